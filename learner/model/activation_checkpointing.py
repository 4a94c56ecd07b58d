"""Activation checkpointing: a layer's activations are computed again in its backward pass.

    none        all that autograd saves
    selective   a layer's input, its matrix products and its attention; norms, rotary embeddings and
                the activation between the products are computed again
    full        a layer's input alone; its forward pass runs twice

The forward method is replaced, not the module: names of parameters stay, and hooks of FSDP2 lie
outside, so that a layer's weights are gathered before it is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from configs.settings import LearnerSettings

from .activation_offload import InputOffload
from .memory_rules import default_checkpointing

Kept = Literal["none", "selective", "full"]

PRODUCTS = ("mm", "addmm", "bmm")
ATTENTION = ("attention", "attn")


def choose(learner: LearnerSettings, module: nn.Module, device: torch.device) -> Kept:
    """Fill in the default of `learner.activation_checkpointing`."""
    if learner.activation_checkpointing is not None:
        return learner.activation_checkpointing
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    return default_checkpointing(
        num_parameters, on_gpu=device.type == "cuda", is_offloaded="activations" in learner.offload
    )


def checkpoint_layers(layers: Iterable[nn.Module], kind: Kept, *, offload: bool = False) -> None:
    """Let each layer compute its activations again; before it is sharded.

    Args:
        layers: Of one model.
        kind: What they keep.
        offload: Keep their inputs in host memory, with `full`.
    """
    if kind == "none":
        return
    context: dict[str, Any] = {} if kind == "full" else {"context_fn": _selective_contexts}
    inputs = InputOffload() if offload else None
    for layer in layers:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing is drawn: dropout is off
            **context,
        )
        if inputs is not None:
            layer.forward = inputs.around(layer.forward)


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
        create_selective_checkpoint_contexts(_keep)
    )
    return contexts


def _keep(_context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    """Keep what is dear to compute again."""
    name = str(operator).split(".")[1]  # of "aten.mm.default"
    is_kept = name in PRODUCTS or any(word in name for word in ATTENTION)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
