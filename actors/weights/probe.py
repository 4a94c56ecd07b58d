"""Judgement of the probe: whether engine and learner compute the same policy. Pure.

Two correct implementations differ by rounding: little on average over tokens, more on a single one.
The size depends on the policy, so the learner sends with each version how much its own log-probs
change when every operation is rounded once more. Correct engines differ by no more than twice that
on average, and may differ by three times.

`docs/weights.md` has the cases by which the bounds were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from broker.protocol.manifest import Probe


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Differences of log-probs over the tokens of a probe, nats."""

    mean: float = 0.0
    largest: float = 0.0

    @classmethod
    def from_logprobs(cls, ours: Sequence[float], theirs: Sequence[float]) -> LogprobDifference:
        """Compare log-probs; infinite if lengths differ or a value is not a number."""
        if len(ours) != len(theirs):
            return cls(math.inf, math.inf)
        by_token = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        if any(map(math.isnan, by_token)):
            return cls(math.inf, math.inf)
        return cls(sum(by_token) / max(1, len(by_token)), max(by_token, default=0.0))

    def is_within(self, bound: LogprobDifference) -> bool:
        """Whether neither the mean nor the largest difference is above its bound."""
        return self.mean <= bound.mean and self.largest <= bound.largest

    def times(self, factor: float) -> LogprobDifference:
        """Multiply both differences by a factor."""
        return LogprobDifference(factor * self.mean, factor * self.largest)

    def __str__(self) -> str:
        """Write both differences for a log or an error."""
        return f"{self.mean:.3g} on average and {self.largest:.3g} at most"


FLOORS = {"float32": LogprobDifference(5e-5, 5e-4), "bfloat16": LogprobDifference(0.005, 0.05)}
"""Bound of any engine, for a policy so certain that its own rounding changes nothing."""
SLACK = 3.0
"""Factor of the learner's rounding for the mean difference, which is over few tokens."""
WIDE = 2.0
"""Further factor for the largest difference, which is that of one token; the mean decides."""


class ProbeJudge:
    """Sets the bound of an engine's difference from the learner.

    Args:
        tolerance: `actors.probe_tolerance`, the only bound if set; None = bounds by the version.
    """

    def __init__(self, tolerance: float | None) -> None:
        self._tolerance = tolerance

    @property
    def is_fixed(self) -> bool:
        """Whether a person has set the bound."""
        return self._tolerance is not None

    def bound(self, probe: Probe, dtype: str) -> LogprobDifference:
        """Return the largest difference that is allowed under this version."""
        if self._tolerance is not None:
            return LogprobDifference(self._tolerance, self._tolerance)
        floor = FLOORS[dtype]
        return LogprobDifference(
            max(floor.mean, SLACK * probe.rounding_mean),
            max(floor.largest, WIDE * SLACK * probe.rounding_max),
        )
