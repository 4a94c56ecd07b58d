"""Discounted returns and generalised advantage estimates of trajectories, on-policy.

Shapes: T steps of a trajectory (time first), B trajectories.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .vtrace import check_shapes, discounted_sums


class Estimates(NamedTuple):
    """Advantages with their value targets; constants to a gradient."""

    advantages: Tensor
    """Shape [T, B]."""
    targets: Tensor
    """Value targets: advantages + values, the lambda-returns. Shape [T, B]."""


@torch.no_grad()
def discounted_returns(rewards: Tensor, discounts: Tensor, bootstrap_value: Tensor) -> Tensor:
    """Discount the rewards from each token on: G_t = r_t + gamma_t G_{t+1}, with G_T = V(x_T).

    Args:
        rewards: Reward after each token. Shape [T, B].
        discounts: Discount after each token, 0 at the end of an episode. Shape [T, B].
        bootstrap_value: V(x_T). Shape [B].

    Returns:
        Shape [T, B].

    Raises:
        ValueError: The shapes do not agree.
    """
    check_shapes(rewards, bootstrap_value, discounts=discounts)
    return discounted_sums(rewards, discounts, bootstrap_value)


@torch.no_grad()
def gae(
    rewards: Tensor, discounts: Tensor, values: Tensor, bootstrap_value: Tensor, *, lam: float
) -> Estimates:
    """Average the advantages over all horizons: lambda trades bias against variance.

    With delta_t = r_t + gamma_t V(x_{t+1}) - V(x_t): A_t = delta_t + gamma_t lambda A_{t+1}. The
    temporal difference alone at lambda = 0; the return less the value at lambda = 1.

    Args:
        rewards: Reward after each token. Shape [T, B].
        discounts: Discount after each token, 0 at the end of an episode. Shape [T, B].
        values: V(x_t). Shape [T, B].
        bootstrap_value: V(x_T). Shape [B].
        lam: lambda, from 0 to 1.

    Raises:
        ValueError: `lam` is out of range, or the shapes do not agree.

    Source:
        Schulman et al. 2016, arXiv:1506.02438, equation 16.
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam must be >= 0 and <= 1, got {lam}")
    check_shapes(rewards, bootstrap_value, discounts=discounts, values=values)
    next_values = torch.cat([values[1:], bootstrap_value[None]])
    deltas = rewards + discounts * next_values - values
    advantages = discounted_sums(deltas, discounts * lam)
    return Estimates(advantages, advantages + values)
