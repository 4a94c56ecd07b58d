"""Descriptions of metrics, and histograms: what a role counts, without the library that shows it.

A role keeps plain numbers; `server.py` turns them into Prometheus' text when it is asked.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a role's page; `nyala metrics` prints all of them."""

    name: str
    """By Prometheus' conventions: prefix, base unit, `_total` of a counter."""
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    meaning: str
    label: str = ""
    """Name of its label; empty = it has none."""


@dataclass(slots=True)
class Histogram:
    """Counts of observations by upper bound. One thread observes, another may read."""

    bounds: Sequence[float]
    """Ascending; above the last one everything counts together."""
    counts: list[int] = field(init=False)
    """Observations in each bucket, the one above the last bound included."""
    total: float = 0.0
    """Sum of all observations."""

    def __post_init__(self) -> None:
        """Begin with nothing."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class BusyTime:
    """Seconds in which there was work, summed. One thread marks, another may read.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sum_s = 0.0
        self._since: float | None = None

    def mark(self, *, is_busy: bool) -> None:
        """Note whether there is work from now on."""
        now, since = self._clock(), self._since
        if since is not None:
            self._sum_s += now - since
        self._since = now if is_busy else None

    @property
    def seconds(self) -> float:
        """The sum up to now."""
        sum_s, since = self._sum_s, self._since
        return sum_s if since is None else sum_s + self._clock() - since


Value: TypeAlias = float | Histogram | Mapping[str, float]
"""Of a metric; a mapping has one for each value of its label."""
Values: TypeAlias = Mapping[str, Value | None]
"""By the metric's name; None, or no entry: it has no value yet."""

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Bounds for waits and steps: alerts ask for 60 s."""
