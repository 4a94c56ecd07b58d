"""Advantages that differ from token to token, from the values at each token's state.

    rewards and values of an episode's trained tokens -> advantages, and targets for the critic

A trajectory is the trained tokens of an episode in order; environment tokens between them are part
of the next state. The reward comes with the last one, where every episode ends: one that the token
limit cut short is worth its reward too, not what could have followed. Adding one = a function here
and a line in `TOKEN_ADVANTAGES`.

pi/mu enters once: V-trace has it in its advantages, truncated, as it was at the beginning of the
batch, prox/mu; so the surrogate's ratio is pi/prox, and no correction weighs prox/mu again. GAE
knows nothing of mu and leaves pi/mu to the correction.

Shapes: N trained tokens of a microbatch (flat), B episodes, T steps of the longest trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from configs.settings import CriticSettings

from .microbatch import Microbatch
from .returns import gae
from .vtrace import vtrace


class TokenAdvantages(NamedTuple):
    """What the optimizer steps of a batch train on; constants to a gradient."""

    advantages_N: Tensor
    """Shape [N], float32."""
    targets_N: Tensor
    """What the critic shall say. Shape [N], float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """The trained tokens of a microbatch, time first; zeros behind the end of each."""

    log_rhos_TB: Tensor
    """log(pi/mu) at the beginning of the batch, nats. Shape [T, B]."""
    rewards_TB: Tensor
    discounts_TB: Tensor
    """gamma, and 0 at the last token. Shape [T, B]."""
    values_TB: Tensor
    nothing_B: Tensor
    """The value behind the last token: 0. Shape [B]."""


def _gae(episodes: Trajectories, settings: CriticSettings) -> tuple[Tensor, Tensor]:
    return gae(
        episodes.rewards_TB,
        episodes.discounts_TB,
        episodes.values_TB,
        episodes.nothing_B,
        lam=settings.lam,
    )


def _vtrace(episodes: Trajectories, settings: CriticSettings) -> tuple[Tensor, Tensor]:
    found = vtrace(
        episodes.log_rhos_TB,
        episodes.rewards_TB,
        episodes.discounts_TB,
        episodes.values_TB,
        episodes.nothing_B,
        rho_bar=settings.rho_bar,
        c_bar=settings.c_bar,
    )
    return found.pg_advantages, found.vs


TOKEN_ADVANTAGES: Mapping[str, Callable[[Trajectories, CriticSettings], tuple[Tensor, Tensor]]] = {
    "gae": _gae,
    "vtrace": _vtrace,
}
"""`algorithm.advantage` -> advantages and targets, both [T, B]."""


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
        microbatch: Whose episodes have a reward each.
        log_rhos_N: log(pi/mu) at the beginning of the batch, nats. Shape [N].
        values_N: V of the state that each token was drawn in. Shape [N].
        name: A line of `TOKEN_ADVANTAGES`.
        settings: Discounts and bounds.
        rewards_N: What each token earns besides its episode's reward, such as a KL. Shape [N].
    """
    if not len(values_N):
        return TokenAdvantages(values_N, values_N)
    episodes_N = microbatch.episodes_N
    lengths_B = torch.bincount(episodes_N, minlength=len(microbatch.rewards_B))
    first_B = lengths_B.cumsum(0) - lengths_B
    steps_N = torch.arange(len(values_N), device=values_N.device) - first_B[episodes_N]
    is_last_N = steps_N == lengths_B[episodes_N] - 1

    def lay_out(tokens_N: Tensor) -> Tensor:
        laid_out_TB = tokens_N.new_zeros(int(lengths_B.max()), len(lengths_B))
        laid_out_TB[steps_N, episodes_N] = tokens_N
        return laid_out_TB

    trajectories = Trajectories(
        log_rhos_TB=lay_out(log_rhos_N),
        rewards_TB=lay_out(
            microbatch.rewards_B[episodes_N] * is_last_N + (0.0 if rewards_N is None else rewards_N)
        ),
        discounts_TB=lay_out(settings.gamma * (~is_last_N).float()),
        values_TB=lay_out(values_N),
        nothing_B=values_N.new_zeros(len(lengths_B)),
    )
    advantages_TB, targets_TB = TOKEN_ADVANTAGES[name](trajectories, settings)
    return TokenAdvantages(advantages_TB[steps_N, episodes_N], targets_TB[steps_N, episodes_N])
