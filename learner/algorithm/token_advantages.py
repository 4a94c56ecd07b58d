"""Advantages that differ from token to token, from a critic's values of the states or a teacher.

    rewards and values of an episode's trained tokens -> advantages, and targets for the critic

A trajectory is the trained tokens of an episode in order; environment tokens between them are part
of the next state. The reward comes with the last token, where every episode ends: an episode that
the token limit cut short is worth its reward too, not what could have followed. An episode with
branches has several trajectories: each goes on with the first token of the log that follows its
last one on a path, ends where none does, and has the episode's reward there. Adding one = a
function here and a line in `TOKEN_ADVANTAGES`.

pi/mu enters once: V-trace has it in its advantages, truncated, as it was at the beginning of the
batch, prox/mu; so the surrogate's ratio is pi/prox, and no correction weighs prox/mu again. GAE
does not involve mu and leaves pi/mu to the correction.

Shapes: N trained tokens of a microbatch (flat), B episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from configs.settings import CriticSettings

from .microbatch import Microbatch, TrajectoryOrder
from .vtrace import check_shapes, discounted_sums, vtrace

# --------------------------------------------------------------------------------------------------
# Discounted returns and generalised advantage estimates of trajectories, on-policy.
#
# Shapes: T steps of a trajectory (time first), B trajectories.


class Estimates(NamedTuple):
    """Advantages with their value targets; constants to a gradient."""

    advantages: Tensor
    """Shape [T, B]."""
    targets: Tensor
    """Value targets: advantages + values, the lambda-returns. Shape [T, B]."""


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


# --------------------------------------------------------------------------------------------------
# Advantages that differ from token to token, from a critic's values of the states.


class TokenAdvantages(NamedTuple):
    """Advantages and value targets of a microbatch's tokens; constants to a gradient."""

    advantages_N: Tensor
    """Shape [N], float32."""
    targets_N: Tensor
    """Value targets of the critic. Shape [N], float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """The trained tokens of a microbatch, one trajectory behind the other: a single column."""

    log_rhos_N1: Tensor
    """log(pi/mu) at the beginning of the batch, nats. Shape [N, 1]."""
    rewards_N1: Tensor
    discounts_N1: Tensor
    """gamma, and 0 at a trajectory's last token: nothing passes from one to the next."""
    values_N1: Tensor
    bootstrap_values_1: Tensor
    """Value past the last token: 0. Shape [1]."""


def _gae(episodes: Trajectories, settings: CriticSettings) -> tuple[Tensor, Tensor]:
    return gae(
        episodes.rewards_N1,
        episodes.discounts_N1,
        episodes.values_N1,
        episodes.bootstrap_values_1,
        lam=settings.lam,
    )


def _vtrace(episodes: Trajectories, settings: CriticSettings) -> tuple[Tensor, Tensor]:
    corrected = vtrace(
        episodes.log_rhos_N1,
        episodes.rewards_N1,
        episodes.discounts_N1,
        episodes.values_N1,
        episodes.bootstrap_values_1,
        rho_bar=settings.rho_bar,
        c_bar=settings.c_bar,
    )
    return corrected.pg_advantages, corrected.vs


TOKEN_ADVANTAGES: Mapping[str, Callable[[Trajectories, CriticSettings], tuple[Tensor, Tensor]]] = {
    "gae": _gae,
    "vtrace": _vtrace,
}
"""`algorithm.advantage` -> advantages and targets, both [N, 1]."""


def token_advantages(
    microbatch: Microbatch,
    log_rhos_N: Tensor,
    values_N: Tensor,
    name: str,
    settings: CriticSettings,
    *,
    rewards_N: Tensor | None = None,
) -> TokenAdvantages:
    """Compute the advantages of a microbatch's tokens, and the critic's targets.

    Args:
        microbatch: Microbatch with each token's episode, and each episode's reward.
        log_rhos_N: log(pi/mu) at the beginning of the batch, nats. Shape [N].
        values_N: V of the state that each token was drawn in. Shape [N].
        name: A line of `TOKEN_ADVANTAGES`.
        settings: Discounts and bounds.
        rewards_N: Rewards of single tokens besides the episode's, such as a KL. Shape [N].

    Raises:
        ValueError: As `gae` and `vtrace` raise it.
    """
    if not len(values_N):
        return TokenAdvantages(values_N, values_N)
    order = TrajectoryOrder.from_microbatch(microbatch)
    order_N, is_last_N = order
    paid_N = microbatch.rewards_B[microbatch.episodes_N[order_N]] * is_last_N
    if rewards_N is not None:
        paid_N = paid_N + rewards_N[order_N]
    trajectories = Trajectories(
        log_rhos_N1=log_rhos_N[order_N, None],
        rewards_N1=paid_N[:, None],
        discounts_N1=settings.gamma * (~is_last_N).float()[:, None],
        values_N1=values_N[order_N, None],
        bootstrap_values_1=values_N.new_zeros(1),
    )
    advantages_N1, targets_N1 = TOKEN_ADVANTAGES[name](trajectories, settings)
    return TokenAdvantages(
        order.restore(advantages_N1.squeeze(1)), order.restore(targets_N1.squeeze(1))
    )


# --------------------------------------------------------------------------------------------------
# The advantage that a teacher gives to each token: on-policy distillation.
#
# With delta_t = log teacher(y_t | state_t) - log pi(y_t | state_t) and episodes y sampled from pi,
#
#     -grad KL(pi || teacher) of episodes = E[sum over t of dlog(pi_t) (delta_t + ... + delta_T)]
#
# because the gradient of -log pi itself vanishes in expectation. Only delta_t is kept here, which
# is a discount of 0. That is exactly the gradient of
#
#     -sum over t of E[KL(pi(. | state_t) || teacher(. | state_t))]    with the states held fixed
#
# Both are largest where pi is the teacher in every state. What is left out is the effect of a token
# on the states after it. Later tokens lower the divergences there themselves, and the sum has a
# variance that grows with the length of the episode.
#
# Source:
#     Agarwal et al. 2024 (GKD), arXiv:2306.13649, section 3 (no gradient through sampling); Lu and
#     Thinking Machines Lab 2025, "On-Policy Distillation" (an advantage with discount 0); Gu et al.
#     2024 (MiniLLM), arXiv:2306.08543, section 2.2 (the sum).


def teacher_advantages(log_pi_N: Tensor, log_teacher_N: Tensor, weight: float) -> Tensor:
    """Reward each token that the teacher finds likelier than the policy does.

    pi/mu is not in it: the surrogate's ratio and the correction weigh it as any other advantage.

    Args:
        log_pi_N: Under the policy at the beginning of the batch, nats. Shape [N].
        log_teacher_N: Under the teacher, nats; NaN where a token has none. Shape [N].
        weight: `algorithm.teacher_weight`.

    Returns:
        weight (log teacher - log pi), 0 without a teacher. Shape [N].
    """
    assert log_pi_N.shape == log_teacher_N.shape
    return weight * torch.where(log_teacher_N.isnan(), 0.0, log_teacher_N - log_pi_N)
