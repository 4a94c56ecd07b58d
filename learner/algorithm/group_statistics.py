"""Rewards of a batch's episodes with their statistics by group, and whitening of advantages.

Whitening brings advantages to mean 0 and standard deviation 1 over a named scope. Adding a scope =
a function here, a line in `WHITENINGS`, and its name in `algorithm.whiten`.

Shapes: E episodes of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Rewards, lengths and groups of a batch's episodes, in the order of the batch."""

    rewards_E: Float64
    """Shaped rewards."""
    lengths_E: Float64
    """Trained tokens; 0 for an episode that overlong filtering took out."""
    groups_E: Int64
    """Index of each episode's group: 0, 1, ..."""

    @property
    def sizes_E(self) -> Float64:
        """Members of each episode's group. Shape [E]."""
        return self.group_sum(np.ones_like(self.rewards_E))

    def group_sum(self, values_E: Float64) -> Float64:
        """Sum over each episode's group. Shape [E]."""
        sums = np.bincount(self.groups_E, values_E).astype(np.float64)
        return sums[self.groups_E]

    def group_mean(self, values_E: Float64) -> Float64:
        """Average over each episode's group. Shape [E]."""
        return self.group_sum(values_E) / self.sizes_E

    def rows_by_group(self) -> list[Int64]:
        """List the rows of each group."""
        num_groups = int(self.groups_E.max(initial=-1)) + 1
        return [np.flatnonzero(self.groups_E == group) for group in range(num_groups)]


Whitening = Callable[[Float64, Outcomes], Float64]

# Keeps a group whose rewards differ by rounding alone from being blown up to unit variance.
STD_FLOOR = 1e-4


def leave_plain(advantages_E: Float64, _outcomes: Outcomes) -> Float64:
    """Return the advantages unchanged."""
    return advantages_E


def whiten_group(advantages_E: Float64, outcomes: Outcomes) -> Float64:
    """Bring each group to mean 0 and sample standard deviation 1, over its episodes."""
    centred_E = advantages_E - outcomes.group_mean(advantages_E)
    variance_E = outcomes.group_sum(centred_E**2) / np.maximum(1, outcomes.sizes_E - 1)
    return np.asarray(centred_E / (np.sqrt(variance_E) + STD_FLOOR))


def whiten_batch(advantages_E: Float64, outcomes: Outcomes) -> Float64:
    """Bring the batch to mean 0 and standard deviation 1, over its trained tokens.

    Over tokens, as for advantages that differ from token to token: an episode counts as often as
    the loss sees it.
    """
    shares_E = outcomes.lengths_E / max(1.0, float(outcomes.lengths_E.sum()))
    centred_E = advantages_E - shares_E @ advantages_E
    return np.asarray(centred_E / (np.sqrt(shares_E @ centred_E**2) + STD_FLOOR))


WHITENINGS: Mapping[str, Whitening] = {
    "none": leave_plain,
    "group": whiten_group,
    "batch": whiten_batch,
}
