"""Sums over the tokens of each episode of a microbatch.

An episode is never cut, so a microbatch knows the whole of each of its episodes.

Shapes: N scored tokens (flat), B episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Which token is of which episode."""

    episodes_N: Tensor
    """Row of each token's episode, ascending. Shape [N], int64."""
    num_episodes: int
    """B; some may have no scored token."""

    def sum(self, values_N: Tensor) -> Tensor:
        """Add up over an episode, said of each of its tokens. Shape [N]."""
        sums_B = values_N.new_zeros(self.num_episodes).index_add(0, self.episodes_N, values_N)
        return sums_B[self.episodes_N]

    def mean(self, values_N: Tensor) -> Tensor:
        """Average over the tokens of an episode, said of each of them. Shape [N]."""
        return self.sum(values_N) / self.sum(values_N.new_ones(values_N.shape))

    def any(self, flags_N: Tensor) -> Tensor:
        """Whether it is so of any token of the episode, said of each of them. Shape [N], bool."""
        return self.sum(flags_N.float()) > 0
