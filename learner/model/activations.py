"""Activations of layers: computed again in the backward pass, or kept in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from configs.settings import LearnerSettings
from learner.weights.layout import count_weights

from .memory_rules import default_checkpointing

# --------------------------------------------------------------------------------------------------
# Inputs of checkpointed layers in host memory, from their forward to their backward pass.
#
#     forward    a layer begins: its input is copied to pinned memory, beside what the card computes
#     backward   it is copied back while the layer after it is computed
#
# Copies run on a stream of their own. On a CPU nothing is copied.

P = ParamSpec("P")
R = TypeVar("R")


class InputOffload:
    """The inputs of the layers of one model."""

    def __init__(self) -> None:
        self._last: _Kept | None = None
        """The input that this forward pass has kept last."""

    def around(self, checkpointed: Callable[P, R]) -> Callable[P, R]:
        """Keep in host memory what a checkpointed forward method saves for its backward pass."""

        @wraps(checkpointed)
        def forward(*args: P.args, **kwargs: P.kwargs) -> R:
            with saved_tensors_hooks(self._keep, self._give_back):
                return checkpointed(*args, **kwargs)

        return forward

    def _keep(self, tensor: Tensor) -> _Kept:
        self._last = _Kept(to_host(tensor), tensor.device, self._last)
        return self._last

    def _give_back(self, kept: _Kept) -> Tensor:
        self._last = None  # the next input belongs to another microbatch
        tensor = kept.take_tensor()
        if kept.before is not None:
            kept.before.fetch()
            kept.before = None
        return tensor


@dataclass(slots=True)
class _Kept:
    """A tensor in host memory."""

    host: Tensor
    device: torch.device
    before: _Kept | None
    """The tensor that the backward pass needs next."""
    tensor: Tensor | None = None
    """The copy on its device, once it has been fetched."""

    def fetch(self) -> None:
        """Begin to copy the tensor back."""
        if self.tensor is None:
            self.tensor = to_device(self.host, self.device)

    def take_tensor(self) -> Tensor:
        """Return the tensor, for use on the current stream."""
        self.fetch()
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        if tensor.is_cuda:
            torch.cuda.current_stream().wait_stream(_copy_stream(tensor.device))
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


def to_host(tensor: Tensor) -> Tensor:
    """Copy a card's tensor; its memory is not used again before the copy has ended."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    _copy_stream(tensor.device).wait_stream(torch.cuda.current_stream())
    with _on_copy_stream(tensor.device):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(_copy_stream(tensor.device))
    return host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor back to a card, after all copies to the host."""
    with _on_copy_stream(device):
        return host.to(device, non_blocking=True)


def _on_copy_stream(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.stream(_copy_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# --------------------------------------------------------------------------------------------------
# Activation checkpointing: a layer's activations are computed again in its backward pass.
#
#   none        all that autograd saves
#   selective   a layer's input, its matrix products and its attention; norms, rotary embeddings and
#               the activation between the products are computed again
#   full        a layer's input alone; its forward pass runs twice
#
# The forward method is replaced, not the module: names of parameters stay, and hooks of FSDP2 lie
# outside, so that a layer's weights are gathered before it is computed again.

Kept = Literal["none", "selective", "full"]

PRODUCTS = ("mm", "addmm", "bmm")
ATTENTION = ("attention", "attn")


def choose(learner: LearnerSettings, module: nn.Module, device: torch.device) -> Kept:
    """Fill in the default of `learner.activation_checkpointing`."""
    if learner.activation_checkpointing is not None:
        return learner.activation_checkpointing
    return default_checkpointing(
        count_weights(module),
        on_gpu=device.type == "cuda",
        is_offloaded="activations" in learner.offload,
    )


def checkpoint_layers(layers: Iterable[nn.Module], kind: Kept, *, offload: bool = False) -> None:
    """Let each layer compute its activations again; call it before they are sharded.

    Args:
        layers: Layers of one model.
        kind: What the layers keep.
        offload: Keep inputs of layers in host memory, with `full`.
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
    """Keep what takes long to compute again."""
    name = str(operator).split(".")[1]  # of "aten.mm.default"
    is_kept = name in PRODUCTS or any(word in name for word in ATTENTION)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
