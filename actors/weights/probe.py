"""Judgement of the probe: whether engine and learner compute the same policy. Pure.

Two right implementations differ by rounding: little on the average over tokens, more on one of
them. How much depends on the policy, and the learner sends with each version what rounding once
more, after every operation, changes in its own log-probs. Right engines show no more than twice
that on average, and may show three times.

`docs/weights.md` has the cases that the bounds were chosen by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from broker.protocol.manifest import Probe


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of log-probs over the tokens of a probe, nats."""

    mean: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Difference:
        """Compare; infinite if lengths differ or a value is not a number."""
        if len(ours) != len(theirs):
            return cls(math.inf, math.inf)
        each = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        if any(map(math.isnan, each)):
            return cls(math.inf, math.inf)
        return cls(sum(each) / max(1, len(each)), max(each, default=0.0))

    def is_within(self, bound: Difference) -> bool:
        """Whether neither is above its bound."""
        return self.mean <= bound.mean and self.largest <= bound.largest

    def times(self, factor: float) -> Difference:
        """Multiply both."""
        return Difference(factor * self.mean, factor * self.largest)

    def __str__(self) -> str:
        """Write both for a log or an error."""
        return f"{self.mean:.3g} on average and {self.largest:.3g} at most"


FLOORS = {"float32": Difference(5e-5, 5e-4), "bfloat16": Difference(0.005, 0.05)}
"""What any engine may show, of a policy that is so certain that its own rounding shows nothing."""
SLACK = 3.0
"""Times the learner's rounding, on average: a mean over a few tokens is no more certain."""
WIDE = 2.0
"""More for the largest difference, which is that of one token; the mean is what decides."""


class ProbeJudge:
    """Judges one engine.

    Args:
        tolerance: `actors.probe_tolerance`; it then bounds the largest difference, alone.
    """

    def __init__(self, tolerance: float | None) -> None:
        self._tolerance = tolerance

    @property
    def is_fixed(self) -> bool:
        """Whether a person has set the bound."""
        return self._tolerance is not None

    def bound(self, probe: Probe, dtype: str) -> Difference:
        """Return what this version may show."""
        if self._tolerance is not None:
            return Difference(self._tolerance, self._tolerance)
        floor = FLOORS[dtype]
        return Difference(
            max(floor.mean, SLACK * probe.rounding_mean),
            max(floor.largest, WIDE * SLACK * probe.rounding_max),
        )
