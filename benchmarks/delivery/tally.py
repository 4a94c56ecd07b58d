"""Counts and times of the requests of a fleet, by kind."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Tally:
    """What came of the requests, by kind."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    busy: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    resent: int = 0
    """Tries that had no answer in time."""
    rejoined: int = 0
    """HELLOs that a broker asked for again."""
    episodes: int = 0
    lost: int = 0
    """Submitted episodes whose verdict was neither OK nor DUP."""

    def shown(self, seconds: float) -> dict[str, Any]:
        """Return rates, and percentiles in milliseconds."""
        figures: dict[str, Any] = {
            "episodes_per_s": round(self.episodes / seconds, 1),
            "lost": self.lost,
            "resent": self.resent,
            "rejoined": self.rejoined,
        }
        for kind, waits in sorted(self.seconds.items()):
            p50, p99 = (np.percentile(waits, (50, 99)) * 1e3).tolist()
            figures[kind] = {
                "per_s": round(len(waits) / seconds, 1),
                "p50_ms": round(p50, 1),
                "p99_ms": round(p99, 1),
                "busy": self.busy[kind],
            }
        return figures
