"""Paired bootstrap: an interval for the mean difference of two runs on the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Float64: TypeAlias = npt.NDArray[np.float64]

RESAMPLES = 10_000  # the ends of the interval move by a fiftieth of its width from seed to seed
CHUNK = 2**22  # draws held at a time, 32 MB
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean with the bounds that hold it in 95 of 100 samples of questions."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the choice of questions alone is unlikely to have made the difference."""
        return self.low > 0 or self.high < 0


def paired_interval(differences: Sequence[float] | Float64, *, seed: int = 0) -> Interval:
    """Bootstrap the mean of paired differences.

    Args:
        differences: One for each question, second run less first.
        seed: Of the draws: the same files give the same interval.

    Returns:
        The mean and its percentile interval of 95 %.

    Source:
        Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapters 8 and 13.
    """
    differences_Q = np.asarray(differences, dtype=np.float64)
    count = len(differences_Q)
    assert count > 0, "there are questions"
    random = np.random.default_rng(seed)
    means: list[Float64] = []
    rows = max(1, min(RESAMPLES, CHUNK // count))
    for start in range(0, RESAMPLES, rows):
        drawn = random.integers(count, size=(min(rows, RESAMPLES - start), count))
        means.append(differences_Q[drawn].mean(axis=1))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
    return Interval(float(differences_Q.mean()), float(low), float(high))
