"""Advantages that differ from token to token, from a critic's values of the states.

    rewards and values of an episode's trained tokens -> advantages, and targets for the critic

A trajectory is the trained tokens of an episode in order; environment tokens between them are part
of the next state. The reward comes with the last token, where every episode ends: an episode that
the token limit cut short is worth its reward too, not what could have followed. Adding one = a
function here and a line in `TOKEN_ADVANTAGES`.

pi/mu enters once: V-trace has it in its advantages, truncated, as it was at the beginning of the
batch, prox/mu; so the surrogate's ratio is pi/prox, and no correction weighs prox/mu again. GAE
does not involve mu and leaves pi/mu to the correction.

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
    """Advantages and value targets of a microbatch's tokens; constants to a gradient."""

    advantages_N: Tensor
    """Shape [N], float32."""
    targets_N: Tensor
    """Value targets of the critic. Shape [N], float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """The trained tokens of a microbatch, time first; zeros past the end of each episode."""

    log_rhos_TB: Tensor
    """log(pi/mu) at the beginning of the batch, nats. Shape [T, B]."""
    rewards_TB: Tensor
    discounts_TB: Tensor
    """gamma, and 0 at the last token. Shape [T, B]."""
    values_TB: Tensor
    bootstrap_values_B: Tensor
    """Values past the last token: 0. Shape [B]."""


def _gae(episodes: Trajectories, settings: CriticSettings) -> tuple[Tensor, Tensor]:
    return gae(
        episodes.rewards_TB,
        episodes.discounts_TB,
        episodes.values_TB,
        episodes.bootstrap_values_B,
        lam=settings.lam,
    )


def _vtrace(episodes: Trajectories, settings: CriticSettings) -> tuple[Tensor, Tensor]:
    found = vtrace(
        episodes.log_rhos_TB,
        episodes.rewards_TB,
        episodes.discounts_TB,
        episodes.values_TB,
        episodes.bootstrap_values_B,
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
        microbatch: Gives each token its episode, and each episode its reward.
        log_rhos_N: log(pi/mu) at the beginning of the batch, nats. Shape [N].
        values_N: V of the state that each token was drawn in. Shape [N].
        name: A line of `TOKEN_ADVANTAGES`.
        settings: Discounts and bounds.
        rewards_N: Rewards of single tokens besides the episode's, such as a KL. Shape [N].
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
        bootstrap_values_B=values_N.new_zeros(len(lengths_B)),
    )
    advantages_TB, targets_TB = TOKEN_ADVANTAGES[name](trajectories, settings)
    return TokenAdvantages(advantages_TB[steps_N, episodes_N], targets_TB[steps_N, episodes_N])
