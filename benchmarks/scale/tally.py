"""Counts of a simulated fleet after its warm-up, and the figures that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.scale.engines import Engine
from benchmarks.scale.workload import Workload


@dataclass(slots=True)
class Tally:
    """What happened after the warm-up."""

    steps: int = 0
    waited_s: float = 0.0
    """Of the learner."""
    lags: Counter[int] = field(default_factory=Counter)
    """Of the oldest tokens of trained episodes."""
    trained_tokens: int = 0
    stale_groups: int = 0
    preempted: int = 0
    resumed: int = 0
    submitted: int = 0
    submitted_tokens: int = 0

    def shown(
        self, workload: Workload, engines: Sequence[Engine], *, actors: int, seconds: float
    ) -> dict[str, float]:
        """Return shares of so many seconds, and rates.

        Args:
            workload: Of the fleet.
            engines: All that were alive for some of the time.
            actors: At a time.
            seconds: Since the warm-up.
        """
        machines_s = actors * seconds
        lags = sorted(self.lags.elements()) or [0]
        return {
            "steps": self.steps,
            "virtual_s": round(seconds, 1),
            "step_every_s": round(seconds / max(1, self.steps), 2),
            "learner_idle": round(self.waited_s / seconds, 3),
            "actor_idle": max(0.0, round(1 - sum(e.busy_s for e in engines) / machines_s, 3)),
            "places_used": round(
                sum(e.place_s for e in engines) / (machines_s * workload.capacity), 3
            ),
            "trained_tokens_per_s": round(self.trained_tokens / seconds),
            "episodes_per_s": round(self.submitted / seconds, 2),
            "submitted_tokens_per_s": round(self.submitted_tokens / seconds),
            "lag_mean": round(sum(lags) / len(lags), 2),
            "lag_p50": lags[len(lags) // 2],
            "lag_p99": lags[int(0.99 * (len(lags) - 1))],
            "stale_groups_share": round(
                self.stale_groups
                / max(1, self.stale_groups + self.steps * workload.groups_per_batch),
                4,
            ),
            "preempted": self.preempted,
            "resumed": self.resumed,
        }
