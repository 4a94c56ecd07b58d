"""V-trace: value targets and advantages for trajectories sampled by another policy.

Owns the recursion alone; losses, tokens and the critic lie elsewhere.

Shapes: T steps of a trajectory (time first), B trajectories.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """Value targets and advantages of trajectories; constants to a gradient."""

    vs: Tensor
    """Value targets v_t. Shape [T, B]."""
    pg_advantages: Tensor
    """rho_t (r_t + gamma_t v_{t+1} - V(x_t)): pi/mu is in them, truncated. Shape [T, B]."""


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    r"""Correct value targets and advantages for the gap between behaviour and target policy.

    With rho_t = min(rho_bar, pi/mu), c_t = min(c_bar, pi/mu) and
    delta_t = rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t)), from the last step to the first:

        v_t - V(x_t) = delta_t + gamma_t c_t (v_{t+1} - V(x_{t+1}))

    Args:
        log_rhos: log(pi/mu) of the sampled tokens, nats. Shape [T, B].
        rewards: Reward after each token. Shape [T, B].
        discounts: Discount after each token, 0 at the end of an episode: steps past a 0, such as
            padding, have no effect on those before it. Shape [T, B].
        values: V(x_t). Shape [T, B].
        bootstrap_value: V(x_T). Shape [B].
        rho_bar: Truncation of rho; decides which policy's value function is the fixed point.
        c_bar: Truncation of the trace; decides how fast it is reached. At most `rho_bar`.

    Returns:
        `vs` and `pg_advantages`, both [T, B], detached.

    Raises:
        ValueError: `c_bar` <= 0 or `c_bar` > `rho_bar`, or the shapes do not agree.

    Source:
        Espeholt et al. 2018, arXiv:1802.01561, sections 4.1-4.2, remark 1.
    """
    if not 0 < c_bar <= rho_bar:
        raise ValueError(
            f"c_bar must be > 0 and <= rho_bar = {rho_bar}, got {c_bar}; "
            "a longer trace than the targets' own truncation has no fixed point to reach"
        )
    check_shapes(rewards, bootstrap_value, log_rhos=log_rhos, discounts=discounts, values=values)
    rhos = log_rhos.exp()
    clipped_rhos, cs = rhos.clamp(max=rho_bar), rhos.clamp(max=c_bar)
    next_values = torch.cat([values[1:], bootstrap_value[None]])
    deltas = clipped_rhos * (rewards + discounts * next_values - values)

    corrections = discounted_sums(deltas, discounts * cs)
    vs = values + corrections
    next_vs = torch.cat([vs[1:], bootstrap_value[None]])
    return VTrace(vs, clipped_rhos * (rewards + discounts * next_vs - values))


def discounted_sums(terms: Tensor, factors: Tensor) -> Tensor:
    """Solve x_t = terms_t + factors_t x_{t+1}, x_T = 0, for all steps at once in log2(T) levels.

    Each level doubles the steps that a sum reaches: over r steps from t on, x is affine in x_{t+r},
    and two of these in a row are one over 2r. In float64, so that long products do not overflow.

    Args:
        terms: Shape [T, B].
        factors: Shape [T, B].

    Returns:
        Shape [T, B].
    """
    sums, reaching = terms.to(torch.float64, copy=True), factors.double()
    reach = 1
    while reach < len(sums):
        near = reaching[: len(sums) - reach]  # those past it have reached the end
        sums[:-reach] += near * sums[reach:]
        reaching = reaching[:-reach] * reaching[reach:]
        reach *= 2
    return sums.to(terms.dtype)


def check_shapes(rewards: Tensor, bootstrap_value: Tensor, **others: Tensor) -> None:
    """Check that all trajectories are [T, B] with T >= 1, and the bootstrap value is [B].

    Raises:
        ValueError: A shape differs.
    """
    if rewards.ndim != 2 or not len(rewards):
        raise ValueError(f"rewards must have a shape [T, B] with T >= 1, got {list(rewards.shape)}")
    expected = {"bootstrap_value": (bootstrap_value, rewards.shape[1:])} | {
        name: (tensor, rewards.shape) for name, tensor in others.items()
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name} must have the shape {list(shape)}, as rewards {list(rewards.shape)} "
                f"have it, got {list(tensor.shape)}"
            )
