"""The weights of one rank that computes in a narrower dtype than it trains in, without FSDP2.

Float32 weights, gradients and moments stay plain tensors. One kernel makes narrow copies of a
layer's weights when its pass begins, and again where its activations are computed again; the copies
end with the pass. Weights whose products are joined (`fused.py`) have one copy, behind each other.
In the backward pass narrow gradients are added to the wide ones as they come.

The numbers are those of FSDP2 on one rank, which would copy weights and gradients more often. Only
joined products differ: they add up gradients of their states before these are rounded. As in FSDP2,
a layer's inputs are narrowed too (the angles of rotary embeddings, which Olmo-2 has in float32).

What lies outside of the layers (embeddings, last norm, output layer) has its copies from the
beginning of the model's forward pass to the end of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from learner.weights.layout import SCALES

from .fused import Joined, join_products
from .lora import AdaptedLinear

KEYS = "weight", "bias"


class Narrowed(Function):
    """Copies of weights in another dtype, whose gradients are added to those of the weights.

    `joined` has places of weights that are one copy, behind each other, at the first of the places.
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, joined: Sequence[Sequence[int]], *wide: Tensor
    ) -> tuple[Tensor | None, ...]:
        narrow: list[Tensor | None] = [None] * len(wide)
        parts: dict[int, Tensor] = {}
        for places in joined:
            begin, rows = wide[places[0]], [len(wide[place]) for place in places]
            narrow[places[0]] = whole = begin.new_empty(sum(rows), *begin.shape[1:], dtype=dtype)
            parts |= zip(places, whole.split(rows), strict=True)
        for place, weight in enumerate(wide):
            if place not in parts:
                narrow[place] = parts[place] = torch.empty_like(weight, dtype=dtype)
        _copy([parts[place] for place in range(len(wide))], wide)
        ctx.wide, ctx.joined = wide, joined
        ctx.set_materialize_grads(False)
        pairs = zip(narrow, wide, strict=True)
        frozen = [copy for copy, weight in pairs if copy is not None and not weight.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(narrow)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[None, ...]:
        gradients = [*grad_outputs]
        for places in ctx.joined:
            if (whole := gradients[places[0]]) is not None:
                parts = whole.split([len(ctx.wide[place]) for place in places])
                for place, part in zip(places, parts, strict=True):
                    gradients[place] = part
        begun, first = list[Tensor](), list[Tensor]()
        for wide, gradient in zip(ctx.wide, gradients, strict=True):
            if gradient is None or not wide.requires_grad:
                continue
            if wide.grad is None:
                wide.grad = torch.empty_like(wide)
                begun.append(wide.grad)
                first.append(gradient)
            else:
                wide.grad.add_(gradient)
        _copy(begun, first)
        return (None,) * (2 + len(ctx.wide))


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy all sources into their targets, on a card by one kernel."""
    if targets:
        torch._foreach_copy_([*targets], [*sources])  # pyright: ignore[reportPrivateImportUsage]


def narrow_layers(layers: Iterable[nn.Module], dtype: torch.dtype, *, joins: bool = False) -> None:
    """Make each layer compute in `dtype`; call it before forward passes are checkpointed.

    Args:
        layers: Layers of one model.
        dtype: Data type of the layers' passes.
        joins: Compute products of the same states as one (`fused.py`).
    """
    narrows_inputs = dtype != torch.float32  # else those of a pass under autocast would be widened
    for layer in layers:
        owners = [*layer.modules()]
        joined = join_products(owners) if joins else []
        layer.forward = _with_narrow(owners, layer.forward, dtype, joined, inputs=narrows_inputs)


def narrow_rest(module: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Make a module compute in `dtype` with its weights outside of `layers`."""
    inner = {id(owner) for layer in layers for owner in layer.modules()}
    owners = [owner for owner in module.modules() if id(owner) not in inner]
    module.forward = _with_narrow(owners, module.forward, dtype, [], inputs=False)


def _widens(owner: nn.Module, key: str) -> bool:
    """Whether a module turns this parameter into the dtype of its inputs by itself."""
    return isinstance(owner, AdaptedLinear) and key in {"weight", SCALES}


def _places(wide: Mapping[int, Tensor], joined: Sequence[Joined]) -> list[list[int]]:
    """Find weights, and biases, that are joined among those that are copied."""
    products = [
        [id(layer._parameters[key]) for layer in layers] for layers in joined for key in KEYS
    ]
    order = {key: place for place, key in enumerate(wide)}
    return [
        [order[key] for key in keys]
        for keys in products
        if all(key in wide for key in keys) and len({wide[key].requires_grad for key in keys}) == 1
    ]


def _with_narrow(
    owners: Sequence[nn.Module],
    method: Callable[..., Any],
    dtype: torch.dtype,
    joined: Sequence[Joined],
    *,
    inputs: bool,
) -> Callable[..., Any]:
    """Return `method` with narrow weights of `owners`, and with narrow inputs if `inputs`."""
    owners = [owner for owner in owners if next(owner.parameters(recurse=False), None) is not None]

    def narrowed(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    def forward(*args: Any, **kwargs: Any) -> Any:
        whole = [dict(owner._parameters) for owner in owners]
        weights = (
            weight
            for owner, kept in zip(owners, whole, strict=True)
            for key, weight in kept.items()
            if weight is not None and not _widens(owner, key)
        )
        wide = {
            id(weight): weight for weight in weights if weight.dtype != dtype
        }  # tied ones stay tied
        places = _places(wide, joined)
        copies = Narrowed.apply(dtype, places, *wide.values()) if wide else ()
        narrow = dict(zip(wide, copies, strict=True))
        try:
            for owner, kept in zip(owners, whole, strict=True):
                changed: dict[str, Any] = {k: narrow.get(id(p), p) for k, p in kept.items()}
                owner._parameters.update(changed)
            if inputs:
                args, kwargs = tree_map_only(Tensor, narrowed, (args, kwargs))
            return method(*args, **kwargs)
        finally:
            for owner, kept in zip(owners, whole, strict=True):
                owner._parameters.update(kept)

    return forward
