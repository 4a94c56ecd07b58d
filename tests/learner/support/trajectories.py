"""Random trajectories in float64, and the papers' sums over them, term by term."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

LENGTHS = (6, 1, 4)
NUM_STEPS = max(LENGTHS)


@dataclass(frozen=True)
class Trajectories:
    """Three episodes of different lengths, time first: rewards and discounts are 0 behind each."""

    log_rhos: Tensor
    rewards: Tensor
    discounts: Tensor
    values: Tensor
    bootstrap_value: Tensor


def random_trajectories(*, seed: int = 0, is_on_policy: bool = False) -> Trajectories:
    """Make trajectories whose ratios go far to both sides of 1; values in the padding are noise.

    The longest one does not end: its last discount is not 0, so the bootstrap value counts.
    """
    random = torch.Generator().manual_seed(seed)
    shape = (NUM_STEPS, len(LENGTHS))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    steps = torch.arange(NUM_STEPS)[:, None]
    is_inside = steps < torch.tensor(LENGTHS)
    is_last = (steps == torch.tensor(LENGTHS) - 1) & (torch.tensor(LENGTHS) < NUM_STEPS)
    discounts = 0.5 + 0.5 * torch.rand(*shape, generator=random, dtype=torch.float64)
    return Trajectories(
        log_rhos=torch.zeros(shape, dtype=torch.float64) if is_on_policy else normal(*shape),
        rewards=normal(*shape) * is_inside,
        discounts=discounts * is_inside * ~is_last,
        values=normal(*shape),
        bootstrap_value=normal(len(LENGTHS)),
    )


def near(expected: float) -> Any:
    """Equal, but for the rounding of float64."""
    return pytest.approx(expected, rel=1e-12, abs=1e-12)


def value_at(episodes: Trajectories, t: int, b: int) -> float:
    """V(x_t), the bootstrap value behind the last step."""
    at_end = t == len(episodes.values)
    return float(episodes.bootstrap_value[b] if at_end else episodes.values[t, b])


def sum_of_products(
    episodes: Trajectories, s: int, b: int, *, rho_bar: float, c_bar: float
) -> float:
    """Compute v_s as equation 1 of the V-trace paper has it, with one discount for each step."""
    total = float(episodes.values[s, b])
    for t in range(s, len(episodes.values)):
        trace = 1.0
        for i in range(s, t):
            ratio = math.exp(float(episodes.log_rhos[i, b]))
            trace *= float(episodes.discounts[i, b]) * min(c_bar, ratio)
        rho = min(rho_bar, math.exp(float(episodes.log_rhos[t, b])))
        target = float(episodes.rewards[t, b])
        target += float(episodes.discounts[t, b]) * value_at(episodes, t + 1, b)
        total += trace * rho * (target - float(episodes.values[t, b]))
    return total


def n_step_return(episodes: Trajectories, s: int, b: int, *, num_steps: int) -> float:
    """Add up `num_steps` rewards from step s on, and the value of where they lead to."""
    total, discount = 0.0, 1.0
    for t in range(s, s + num_steps):
        total += discount * float(episodes.rewards[t, b])
        discount *= float(episodes.discounts[t, b])
    return total + discount * value_at(episodes, s + num_steps, b)
