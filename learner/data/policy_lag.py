"""Policy lag: the number of batches between the policy that sampled a token and its training.

A version (lineage, v) is v batches old at birth. Each lineage records the step it forked at.
Batch k is trained by version k - 1, so a token of this history has lag (k - 1) - v. A token of
an abandoned branch was sampled after v - fork batches that this history never saw; its lag
counts both sides of the fork:

    its lag is (k - 1 - fork) + max(0, v - fork)

where fork is the earliest step at which any later lineage, up to the learner's own, left the
branch.

A token is fresh up to the bound of its batch, and stale beyond it. With `buffer.on_stale: mask`
stale tokens stay in their rows as context, and their loss mask is 0.

Shapes: T tokens of a completion, S spans of one version each, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import numpy.typing as npt

from buffer.operations.values import StaleMask
from buffer.record.episode import Episode, PolicyVersion

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FreshTokens:
    """Sampled tokens of new groups and of groups dropped as stale, and what became of them."""

    sampled: int = 0
    trained: int = 0
    masked: int = 0
    """Tokens of trained groups that were masked as stale."""
    fresh: int = 0
    """Tokens within the lag bound at their claim."""
    fresh_trained: int = 0

    @classmethod
    def dropped(cls, lags_N: Int64, bound: int) -> FreshTokens:
        """Count the tokens of a group that is dropped as stale."""
        return cls(sampled=len(lags_N), fresh=int(np.count_nonzero(lags_N <= bound)))

    def __add__(self, other: FreshTokens) -> FreshTokens:
        """Add the tokens of another batch."""
        return FreshTokens(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def figures(self) -> dict[str, float]:
        """Return what the lag bound cost; docs/metrics.md has the meaning of each figure."""
        return {
            "fresh_trained_fraction": self.fresh_trained / self.fresh if self.fresh else 1.0,
            "sampled_trained_fraction": self.trained / self.sampled if self.sampled else 1.0,
            "stale_masked_tokens": self.masked,
        }


def policy_lags(
    versions: Sequence[PolicyVersion], *, step: int, lineage: int, lineages: Mapping[int, int]
) -> Int64:
    """Compute the lag of tokens of each version when batch `step` is trained in `lineage`.

    Args:
        versions: Versions of the policy that sampled the tokens.
        step: The batch that trains them, the first being 1.
        lineage: Lineage of the learner.
        lineages: lineage -> step it forked at.

    Returns:
        Batches, by the formula of this module; never negative within a history. Shape [S].
    """
    lineages_S = np.fromiter((version.lineage for version in versions), np.int64)
    steps_S = np.fromiter((version.step for version in versions), np.int64)
    lags_S = step - 1 - steps_S
    for sampled_in in np.unique(lineages_S).tolist():
        forks = [fork for other, fork in lineages.items() if sampled_in < other <= lineage]
        if forks:
            beyond_S = np.maximum(steps_S - min(forks), 0)
            lags_S += np.where(lineages_S == sampled_in, 2 * beyond_S, 0)
    return lags_S


def token_lags(episode: Episode, step: int, lineage: int, lineages: Mapping[int, int]) -> Int64:
    """Compute the lag of every completion token of an episode, batches. Shape [T]."""
    spans, length = episode.completion.versions, len(episode.completion.token_ids)
    lags_S = policy_lags(
        [span.version for span in spans], step=step, lineage=lineage, lineages=lineages
    )
    return np.repeat(lags_S, np.diff([*(span.start for span in spans), length]))


def trained_lags(
    episodes: Iterable[Episode], step: int, lineage: int, lineages: Mapping[int, int]
) -> Int64:
    """Compute the lags of the trained tokens of episodes, batches. Shape [N]."""
    lags = [
        token_lags(episode, step, lineage, lineages)[episode.completion.loss_mask.astype(bool)]
        for episode in episodes
    ]
    return np.concatenate(lags) if lags else np.zeros(0, dtype=np.int64)


def oldest_lag(episode: Episode, step: int, lineage: int, lineages: Mapping[int, int]) -> int:
    """Compute the lag of the oldest trained token of an episode; 0 if none is trained."""
    return int(trained_lags([episode], step, lineage, lineages).max(initial=0))


def mask_stale(
    episodes: Iterable[Episode],
    mask: StaleMask | None,
    *,
    step: int,
    lineages: Mapping[int, int],
    reused: Container[int],
) -> list[Episode]:
    """Set the loss mask of stale tokens to 0; all else stays, the reward included.

    A function of records and of what was sealed with the batch: whenever and on whichever rank it
    is computed, the same tokens are masked.

    Args:
        episodes: Episodes of a sealed batch, all of them or a rank's share.
        mask: The mask that the batch was sealed with; None = all tokens are trained.
        step: The batch.
        lineages: lineage -> step it forked at.
        reused: Groups of the batch that are trained again; `mask` has a bound of its own for them.
    """
    if mask is None:
        return list(episodes)
    masked = []
    for episode in episodes:
        bound = mask.reused_max_lag if episode.group_id in reused else mask.max_lag
        is_fresh_T = token_lags(episode, step, mask.lineage, lineages) <= bound
        loss_mask = np.where(is_fresh_T, episode.completion.loss_mask, np.uint8(0))
        masked.append(replace(episode, completion=replace(episode.completion, loss_mask=loss_mask)))
    return masked
