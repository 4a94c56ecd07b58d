"""Contents of a model's storage, compared with the version that they should be.

Parameters are compared as they are. A layer on a CPU multiplies with a packed copy of its weight,
whose format is the kernel's own: its product with an identity is that weight again, exactly, since
every other summand is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from actors.engine.vllm_private import PACKED

from .fill_plan import FillPlan

COLUMNS = 64
"""Columns of a packed weight that are read at a time, which bounds the product."""


MOST_OPERATIONS = 4e12
"""About a minute of one core; the product of a model of 0.6 billion parameters takes half of it."""


@torch.no_grad()
def stale_parameters(
    model: nn.Module,
    plan: FillPlan,
    tensors: Mapping[str, Tensor],
    moved: Callable[[], object] = lambda: None,
) -> list[str] | None:
    """Name the parameters that differ from a version in any value; +0 and -0 are equal.

    Args:
        model: The model in use; no step may run meanwhile, as kernels keep state of their own.
        plan: Pieces of the model's parameters.
        tensors: Tensors of the version.
        moved: Called after each product of a packed weight, all of which may take minutes.

    Returns:
        None where packed weights are so large that reading them would hold the engine up.
    """
    names = {id(value): name for name, value in model.named_parameters()}
    packed = [(names[id(layer.weight)], layer) for layer in _packed_layers(model)]
    shapes = [plan.shapes[name] for name, _ in packed]
    if sum(2.0 * rows * width * width for rows, width in shapes) > MOST_OPERATIONS:
        return None
    stale = {
        name
        for name, stored in model.named_parameters()
        if stored.numel() and not _equals_version(stored, plan, name, tensors)
    }
    stale |= {
        name
        for name, layer in packed
        if name not in stale and not _packs_weight(layer, plan.whole(name, tensors), moved)
    }
    return sorted(stale)


def _packed_layers(model: nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if PACKED in vars(layer))


def _equals_version(
    stored: Tensor, plan: FillPlan, name: str, tensors: Mapping[str, Tensor]
) -> bool:
    return all(
        torch.equal(place.inside(stored), value.to(stored.device, stored.dtype))
        for place, value in plan.parts(name, tensors)
    )


def _packs_weight(layer: Any, weight: Tensor, moved: Callable[[], object]) -> bool:
    width = weight.shape[1]
    for start in range(0, width, COLUMNS):
        columns = slice(start, min(start + COLUMNS, width))
        unit = torch.zeros(columns.stop - start, width, dtype=weight.dtype)
        unit[:, columns].fill_diagonal_(1)
        if not torch.equal(getattr(layer, PACKED)(unit, layer.weight, None), weight[:, columns].T):
            return False
        moved()
    return True
