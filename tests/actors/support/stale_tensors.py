"""Versions in which one tensor lags by the smallest step: what a reading of storage must find."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

INFINITY = torch.tensor(torch.inf)


def lagging(
    tensors: dict[str, Tensor], *, count: int, seed: int = 0
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the name of a random tensor, and the version with that tensor one step behind."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice(sorted(tensors))
        step = draw.choice(STEPS)
        behind = tensors[name].clone()
        step(behind, draw.randrange(behind.numel()))
        if torch.equal(behind, tensors[name]):  # in bfloat16 a millionth is often no step at all
            by_one_bit(behind, 0)
        yield name, tensors | {name: behind}


def by_a_millionth(tensor: Tensor, _: int) -> None:
    """Move every value."""
    tensor.add_(1e-6)


def by_one_bit(tensor: Tensor, at: int) -> None:
    """Move one value by one unit in its last place."""
    flat = tensor.view(-1)
    flat[at] = torch.nextafter(flat[at], INFINITY.to(tensor.dtype))


STEPS: tuple[Callable[[Tensor, int], None], ...] = (by_a_millionth, by_one_bit)
