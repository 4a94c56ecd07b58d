"""Measuring a fleet: looks at its actors and times of batches become what `wanted.py` decides by.

Pure, with the caller's clock. Keeps as many batches as fill `WINDOW_S`, and three at least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from .wanted import Measured

WINDOW_S = 120.0
FEWEST_BATCHES = 3


@dataclass(slots=True)
class _Stretch:
    """One batch, and the looks since the one before; all in seconds."""

    span_s: float = field(init=False)
    wait_s: float = field(init=False)
    looked_s: float = 0.0
    """Between looks."""
    actor_s: float = 0.0
    """Of all actors, between looks."""
    known_s: float = 0.0
    """Of actors that were there at both looks."""
    busy_s: float = 0.0
    """Of these."""


class Meter:
    """Looks and batches in; averages out."""

    def __init__(self) -> None:
        self._window: deque[_Stretch] = deque()
        self._now = _Stretch()
        self._looked_at: float | None = None
        self._busy: Mapping[str, float] = {}
        self._version_s: float  # of the last look, without which nothing is measured

    def look(self, now_s: float, busy: Mapping[str, float], *, version_s: float = 0.0) -> None:
        """Take the actors of one moment.

        Args:
            now_s: By the caller's clock.
            busy: Actor with weights -> seconds of work since its start.
            version_s: Until the newest version was everywhere.
        """
        stretch = self._now
        if self._looked_at is not None:
            passed_s = now_s - self._looked_at
            both = busy.keys() & self._busy.keys()
            stretch.looked_s += passed_s
            stretch.actor_s += passed_s * (len(busy) + len(self._busy)) / 2
            stretch.known_s += passed_s * len(both)
            stretch.busy_s += sum(
                min(passed_s, max(0.0, busy[name] - self._busy[name])) for name in both
            )
        self._looked_at, self._busy, self._version_s = now_s, dict(busy), version_s

    def batch(self, *, wait_s: float, span_s: float) -> Measured | None:
        """Take a batch, and measure; None as long as too little is known.

        Args:
            wait_s: For its episodes.
            span_s: Since the batch before, the wait included.
        """
        window, stretch = self._window, self._now
        stretch.wait_s, stretch.span_s = wait_s, span_s
        window.append(stretch)
        self._now = _Stretch()
        while len(window) > FEWEST_BATCHES and self._total("span_s") - window[0].span_s > WINDOW_S:
            window.popleft()
        span_s, looked_s, known_s = map(self._total, ("span_s", "looked_s", "known_s"))
        if not span_s or not looked_s or not known_s:
            return None
        wait_s = self._total("wait_s")
        return Measured(
            actors=self._total("actor_s") / looked_s,
            busy=self._total("busy_s") / known_s,
            idle=wait_s / span_s,
            step_s=(span_s - wait_s) / len(window),
            version_s=self._version_s,
        )

    def _total(self, name: str) -> float:
        return sum(float(getattr(stretch, name)) for stretch in self._window)
