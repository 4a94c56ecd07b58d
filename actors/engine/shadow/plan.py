"""Plan of a fill: which rows of which parameter each tensor of a version becomes.

vLLM's loader puts one tensor after the other into its place, and counts, wraps and copies in Python
on the way. Where they end up is the same each time, so it is found out once: a model of that shape
is loaded with tensors that hold their own number, and the numbers are read where they have arrived.
Random values then go both ways, through the loader and by the plan; where one of them differs there
is no plan, and the loader goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actors.engine.wire_tensors import TORCH_DTYPES
from broker.protocol.manifest import TensorSpec

BASE = 100
"""Numbers of tensors are written in digits below this, which any dtype holds exactly."""

Load = Callable[[nn.Module, Iterable[tuple[str, Tensor]]], object]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a parameter that are one tensor of a version."""

    start: int
    stop: int
    tensor: str


class FillPlan:
    """Rows of every parameter.

    Args:
        rows: By the name of the parameter.
    """

    def __init__(self, rows: Mapping[str, Sequence[Rows]]) -> None:
        self._rows = rows

    def parts(self, parameter: str, tensors: Mapping[str, Tensor]) -> list[tuple[Rows, Tensor]]:
        """Return the parts of a parameter, in order."""
        return [(rows, tensors[rows.tensor]) for rows in self._rows[parameter]]

    def whole(self, parameter: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a parameter; without a copy where it is one tensor."""
        parts = [tensor for _, tensor in self.parts(parameter, tensors)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy(self, parameter: str, tensors: Mapping[str, Tensor], into: Tensor) -> None:
        """Copy a parameter into its place."""
        for rows, tensor in self.parts(parameter, tensors):
            into[rows.start : rows.stop].copy_(tensor)


@torch.no_grad()
def make_plan(model: nn.Module, specs: Sequence[TensorSpec], load: Load) -> FillPlan | None:
    """Find the places of a version's tensors.

    Args:
        model: New, not processed for its kernels; its weights are lost.
        specs: Tensors of a version.
        load: vLLM's loader.

    Returns:
        None where a tensor becomes something else than rows of one parameter.
    """
    numbers: dict[str, Tensor] = {}
    for factor in (1, BASE):
        _clear(model)
        load(model, _digits(specs, factor))
        for name, parameter in model.named_parameters():
            digits = parameter.flatten(1) if parameter.ndim > 1 else parameter[:, None]
            if not bool((digits == digits[:, :1]).all()):
                return None
            digit = digits[:, 0].to(torch.int64) - 1
            numbers[name] = numbers.get(name, 0) + factor * digit
    rows = {name: list(_runs(found, specs)) for name, found in numbers.items()}
    plan = FillPlan(rows)
    return plan if _agrees(plan, model, specs, load) else None


def _digits(specs: Sequence[TensorSpec], factor: int) -> Iterator[tuple[str, Tensor]]:
    for number, spec in enumerate(specs):
        digit = number // factor % BASE + 1  # 0 = nothing was loaded
        yield spec.name, torch.full(spec.shape, digit, dtype=TORCH_DTYPES[spec.dtype])


def _runs(numbers: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Rows]:
    """Yield runs of one number; below 0 are rows that nothing was loaded into."""
    found, counts = torch.unique_consecutive(numbers, return_counts=True)
    start = 0
    for number, count in zip(found.tolist(), counts.tolist(), strict=True):
        if 0 <= number < len(specs):
            yield Rows(start, start + count, specs[number].name)
        start += count


def _agrees(plan: FillPlan, model: nn.Module, specs: Sequence[TensorSpec], load: Load) -> bool:
    random = torch.Generator().manual_seed(0)
    tensors = {
        spec.name: torch.randn(spec.shape, generator=random).to(TORCH_DTYPES[spec.dtype])
        for spec in specs
    }
    _clear(model)
    load(model, tensors.items())
    for name, parameter in model.named_parameters():
        ours = torch.zeros_like(parameter)
        for rows, tensor in plan.parts(name, tensors):
            if tensor.shape != ours[rows.start : rows.stop].shape:
                return False
        plan.copy(name, tensors, ours)
        if not torch.equal(ours, parameter):
            return False
    return True


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()
