"""Names, order and places of the tensors of a model in its wire form.

Tensors of adapters are not part of it: their matrices are published merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from broker.protocol.manifest import TensorSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing add to names; actors lack them."""
ADAPTER = ("lora_a", "lora_b")
"""Names that a `Merging` module gives the parameters of its adapter."""
SCALES = "weight_scales"
"""Name that it gives the scales of a weight in 4 bits."""


def published(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield published tensors in wire order. A tied output layer comes once, as the embedding."""
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if not is_own(name):
            yield unwrapped_name(name), parameter


def is_own(name: str) -> bool:
    """Return whether saved models and engines lack a parameter of this name."""
    return name.rpartition(".")[2] in (*ADAPTER, SCALES)


def is_packed(parameter: torch.Tensor) -> bool:
    """Return whether a parameter holds a matrix as codes of 4 bits, two in a byte."""
    return parameter.dtype == torch.uint8


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the weight that a parameter holds."""
    *rows, columns = parameter.shape or (1,)
    return (*rows, 2 * columns) if is_packed(parameter) else tuple(parameter.shape)


def count_weights(model: nn.Module) -> int:
    """Count the weights of a model, in whatever format they are kept."""
    named = model.named_parameters()
    return sum(
        math.prod(shape_of(parameter)) for name, parameter in named if not name.endswith(SCALES)
    )


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
        shape = shape_of(parameter)
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        specs.append(TensorSpec(name, dtype, shape, offset, num_bytes))
        offset += num_bytes
    return tuple(specs)
