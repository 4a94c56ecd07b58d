"""Policy lag: the number of batches between the policy that sampled a token and its training.

A version (lineage, v) is v batches old at birth. Each lineage records the step it forked at.
Batch k is trained by version k - 1, so a token of this history has lag (k - 1) - v. A token of
an abandoned branch was sampled after v - fork batches that this history never saw; its lag
counts both sides of the fork:

    its lag is (k - 1 - fork) + max(0, v - fork)

where fork is the earliest step at which any later lineage, up to the learner's own, left the
branch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from buffer.record.episode import Episode, PolicyVersion

Int64 = npt.NDArray[np.int64]


def policy_lag(
    version: PolicyVersion, *, step: int, lineage: int, lineages: Mapping[int, int]
) -> int:
    """Compute the lag of a token of `version` when batch `step` is trained in `lineage`.

    Args:
        version: Version of the policy that sampled the token.
        step: The batch that trains it, the first being 1.
        lineage: Lineage of the learner.
        lineages: lineage -> step it forked at.

    Returns:
        Batches, by the formula of this module; never negative within a history.
    """
    trained = step - 1
    forks = [fork for other, fork in lineages.items() if version.lineage < other <= lineage]
    fork = min(forks, default=None)
    if fork is None or version.step <= fork:
        return trained - version.step
    return (trained - fork) + (version.step - fork)


def token_lags(episode: Episode, step: int, lineage: int, lineages: Mapping[int, int]) -> Int64:
    """Compute the lag of every completion token of an episode, batches. Shape [T]."""
    completion = episode.completion
    lags_T = np.zeros(len(completion.token_ids), dtype=np.int64)
    for span in completion.versions:
        lags_T[span.start :] = policy_lag(
            span.version, step=step, lineage=lineage, lineages=lineages
        )
    return lags_T


def oldest_lag(episode: Episode, step: int, lineage: int, lineages: Mapping[int, int]) -> int:
    """Compute the lag of the oldest trained token of an episode; 0 if none is trained."""
    lags_T = token_lags(episode, step, lineage, lineages)
    trained_T = episode.completion.loss_mask.astype(bool)
    return int(lags_T[trained_T].max(initial=0))
