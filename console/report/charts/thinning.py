"""Curves of any length as at most `MOST` points: means of neighbouring batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST = 160  # points of a curve: one for every third pixel of a chart


def buckets(count: int, *, most: int = MOST) -> list[range]:
    """Divide so many batches into at most so many stretches of equal length, the last one shorter.

    Example:
        >>> buckets(3)
        [range(0, 1), range(1, 2), range(2, 3)]
    """
    width = max(1, math.ceil(count / most))
    return [range(start, min(count, start + width)) for start in range(0, count, width)]


def mean(values: Sequence[float], bucket: range) -> float:
    """Average what is finite of a stretch; NaN where nothing is."""
    known = [values[i] for i in bucket if math.isfinite(values[i])]
    return math.fsum(known) / len(known) if known else math.nan


def thinned(values: Sequence[float], *, most: int = MOST) -> list[float]:
    """Average each stretch."""
    return [mean(values, bucket) for bucket in buckets(len(values), most=most)]
