"""The weights of one rank that computes in a narrower dtype than it trains in, without FSDP2.

Float32 weights, gradients and moments stay plain tensors. A layer begins with narrow copies of its
weights, made by one kernel for all of them, and again where its activations are computed again:
outside of its passes none of them exists. In the backward pass narrow gradients are added to the
wide ones as they come. The numbers are those of FSDP2 on one rank, whose gathering and reducing
would copy weights and gradients some times more; as there, a layer's inputs are narrowed too (the
angles of rotary embeddings, which Olmo-2 has in float32).

What lies outside of the layers (embeddings, last norm, output layer) has its copies from the
beginning of the model's forward pass to the end of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from learner.weights.layout import SCALES

from .lora import AdaptedLinear


class Narrowed(Function):
    """Copies of weights in another dtype, whose gradients are added to those of the weights."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *wide: Tensor) -> tuple[Tensor, ...]:
        narrow = [torch.empty_like(each, dtype=dtype) for each in wide]
        torch._foreach_copy_(narrow, wide)  # pyright: ignore[reportPrivateImportUsage]
        ctx.wide = wide
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(copy for copy, each in zip(narrow, wide, strict=True) if not each.requires_grad)
        )
        return tuple(narrow)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[None, ...]:
        first: list[tuple[Tensor, Tensor]] = []
        for wide, gradient in zip(ctx.wide, grad_outputs, strict=True):
            if gradient is None or not wide.requires_grad:
                continue
            if wide.grad is None:
                wide.grad = torch.empty_like(wide)
                first.append((wide.grad, gradient))
            else:
                wide.grad.add_(gradient)
        if first:
            torch._foreach_copy_(*map(list, zip(*first, strict=True)))  # pyright: ignore[reportPrivateImportUsage]
        return (None,) * (1 + len(ctx.wide))


def narrow_layers(layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Let each layer compute in `dtype`; before its forward pass is checkpointed."""
    narrows_inputs = dtype != torch.float32  # else those of a pass under autocast would be widened
    for layer in layers:
        own = layer.forward
        layer.forward = _with_narrow([*layer.modules()], own, dtype, inputs=narrows_inputs)


def narrow_rest(module: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Let a module compute in `dtype` with what it has outside of `layers`."""
    inner = {id(each) for layer in layers for each in layer.modules()}
    owners = [each for each in module.modules() if id(each) not in inner]
    module.forward = _with_narrow(owners, module.forward, dtype, inputs=False)


def _widens(owner: nn.Module, key: str) -> bool:
    """Whether a module turns this parameter into the dtype of its inputs by itself."""
    return isinstance(owner, AdaptedLinear) and key in {"weight", SCALES}


def _with_narrow(
    owners: Sequence[nn.Module], own: Callable[..., Any], dtype: torch.dtype, *, inputs: bool
) -> Callable[..., Any]:
    """Compute `own` with narrow weights of `owners`, and of narrow inputs."""
    owners = [each for each in owners if next(each.parameters(recurse=False), None) is not None]

    def narrowed(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    def forward(*args: Any, **kwargs: Any) -> Any:
        whole = [dict(owner._parameters) for owner in owners]
        found = (
            each
            for owner, kept in zip(owners, whole, strict=True)
            for key, each in kept.items()
            if each is not None and not _widens(owner, key)
        )
        wide = {id(each): each for each in found if each.dtype != dtype}  # tied ones stay tied
        copies = Narrowed.apply(dtype, *wide.values()) if wide else ()
        narrow = dict(zip(wide, copies, strict=True))
        try:
            for owner, kept in zip(owners, whole, strict=True):
                changed: dict[str, Any] = {k: narrow.get(id(p), p) for k, p in kept.items()}
                owner._parameters.update(changed)
            if inputs:
                args, kwargs = tree_map_only(Tensor, narrowed, (args, kwargs))
            return own(*args, **kwargs)
        finally:
            for owner, kept in zip(owners, whole, strict=True):
                owner._parameters.update(kept)

    return forward
