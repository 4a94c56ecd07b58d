"""Names, order and places of the tensors of a model in its wire form.

Tensors of adapters are not part of it: their matrices are published merged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from broker.protocol.manifest import TensorSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing add to names; actors lack them."""
ADAPTER = ("lora_a", "lora_b")
"""Names that a `Merging` module gives the parameters of its adapter."""


def published(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield published tensors in wire order. A tied output layer comes once, as the embedding."""
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if not is_adapter(name):
            yield unwrapped_name(name), parameter


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is part of an adapter."""
    return name.rpartition(".")[2] in ADAPTER


def unwrapped_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def layout(model: nn.Module, dtype: str) -> tuple[TensorSpec, ...]:
    """Lay the tensors out in the wire bytes; the same on every rank."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, parameter in published(model):
        num_bytes = parameter.numel() * DTYPES[dtype].itemsize
        specs.append(TensorSpec(name, dtype, tuple(parameter.shape), offset, num_bytes))
        offset += num_bytes
    return tuple(specs)
