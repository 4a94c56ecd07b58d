"""Microbatches: the tensors of one forward pass, and sums over the tokens of their episodes.

An episode is never cut, so a microbatch has all tokens of each of its episodes.

Shapes: B episodes, T tokens of all of them (prompts and completions), N of these that are trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .sequences import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Tensors of one forward pass. Flat arrays hold trained tokens only."""

    sequences: Sequences
    """Prompts with completions, B of them."""
    indices_N: Tensor
    """Place of each trained token among the T. Shape [N], int64."""
    behaviour_logprobs_N: Tensor
    """log mu, nats. Shape [N], float32."""
    advantages_N: Tensor
    """Shape [N], float32."""
    weights_N: Tensor
    """Weight of each token in the loss of the batch. Shape [N], float32."""
    lags_N: Tensor
    """Policy lag of each token, batches. Shape [N], int64."""
    episodes_N: Tensor
    """Number of each token's episode, ascending: 0 to B - 1. Shape [N], int64."""
    rewards_B: Tensor
    """Reward of each episode. Shape [B], float32."""
    minibatch: int
    """Index of its optimizer step within an epoch, from 0."""

    def to(self, device: torch.device) -> Microbatch:
        """Copy to a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in values.items()
            if isinstance(value, Tensor | Sequences)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A microbatch on the learner's device, with the constants of a batch's optimizer steps."""

    microbatch: Microbatch
    log_prox_N: Tensor | None = None
    """Log-probs under the policy at the beginning of the batch, nats. Shape [N]."""
    log_ref_N: Tensor | None = None
    """Log-probs under the frozen reference policy, nats. Shape [N]."""
    values_N: Tensor | None = None
    """The critic's values. Shape [N]."""
    targets_N: Tensor | None = None
    """Value targets of the critic. Shape [N]."""
    log_ratio_bound: float = math.inf
    """M2PO: largest |log(pi/mu)| that stays, set before each optimizer step; nats."""

    def take(self, places: Tensor) -> Prepared:
        """Keep some of the N tokens alone; what belongs to sequences and episodes stays."""
        own = replace(self.microbatch, **_taken(self.microbatch, places))
        return replace(self, microbatch=own, **_taken(self, places))


def _taken(owner: Microbatch | Prepared, places: Tensor) -> dict[str, Any]:
    values = {f.name: getattr(owner, f.name) for f in fields(owner) if f.name.endswith("_N")}
    return {name: None if value is None else value[places] for name, value in values.items()}


def empty_microbatch(minibatch: int = 0) -> Microbatch:
    """Make a microbatch without a trained token.

    A rank with fewer microbatches than another adds these, to take part in every collective of
    FSDP2.
    """
    nothing = torch.zeros(0)
    return Microbatch(
        sequences=Sequences.of([[0]]),
        indices_N=nothing.long(),
        behaviour_logprobs_N=nothing,
        advantages_N=nothing,
        weights_N=nothing,
        lags_N=nothing.long(),
        episodes_N=nothing.long(),
        rewards_B=torch.zeros(1),
        minibatch=minibatch,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Token-to-episode index of a microbatch."""

    episodes_N: Tensor
    """Number of each token's episode, ascending. Shape [N], int64."""
    num_episodes: int
    """B; some may have no trained token."""

    def sum(self, values_N: Tensor) -> Tensor:
        """Sum over each token's episode. Shape [N]."""
        sums_B = values_N.new_zeros(self.num_episodes).index_add(0, self.episodes_N, values_N)
        return sums_B[self.episodes_N]

    def mean(self, values_N: Tensor) -> Tensor:
        """Average over the tokens of each token's episode. Shape [N]."""
        return self.sum(values_N) / self.sum(values_N.new_ones(values_N.shape))

    def any(self, flags_N: Tensor) -> Tensor:
        """True where any token of the same episode is. Shape [N], bool."""
        return self.sum(flags_N.float()) > 0
