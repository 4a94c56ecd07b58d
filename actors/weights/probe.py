"""Judgement of the probe: whether engine and learner compute the same policy. Pure.

Two right implementations differ by rounding: little on the average over tokens, more on one of
them. How much depends on the policy, and the learner sends with each version what one more rounding
changes in its own log-probs. How much of that an engine shows depends on its kernels: its first
version calibrates it, and each later one may show a multiple of that.

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


FLOORS = {"float32": Difference(1e-3, 1e-3), "bfloat16": Difference(0.05, 1.0)}
"""What any engine may show: float32 agrees to 1e-6, bfloat16 has 8 bits."""
SLACK = 3.0
"""Times what this engine has shown at its first version, both in units of the learner's rounding;
a mean over a few tokens is no more certain than that."""
WIDE = 2.0
"""More for the largest difference, which is that of one token; the mean is what decides."""
LARGEST_RATIO = 2.0
"""That the first version may calibrate an engine by: right ones differ by 0.5 to 1.5 roundings."""


class ProbeJudge:
    """Judges one engine.

    Args:
        tolerance: `actors.probe_tolerance`; it then bounds the largest difference, alone.
    """

    def __init__(self, tolerance: float | None) -> None:
        self._tolerance = tolerance
        self._ratio: float | None = None
        """Of what the first version has shown to the learner's rounding; None before it."""

    @property
    def is_fixed(self) -> bool:
        """Whether a person has set the bound."""
        return self._tolerance is not None

    def bound(self, probe: Probe, dtype: str) -> Difference:
        """Return what this version may show."""
        if self._tolerance is not None:
            return Difference(self._tolerance, self._tolerance)
        floor = FLOORS[dtype]
        factor = SLACK * (LARGEST_RATIO if self._ratio is None else self._ratio)
        return Difference(
            max(floor.mean, factor * probe.rounding_mean),
            max(floor.largest, WIDE * factor * probe.rounding_max),
        )

    def accepts(self, difference: Difference, probe: Probe, dtype: str) -> bool:
        """Decide; what is accepted first calibrates the engine."""
        if not difference.is_within(self.bound(probe, dtype)):
            return False
        if self._ratio is None:
            shown = difference.mean / probe.rounding_mean if probe.rounding_mean else 1.0
            self._ratio = min(LARGEST_RATIO, max(1.0, shown))
        return True
