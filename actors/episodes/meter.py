"""How fast an actor is, for `nyala status`."""

from __future__ import annotations

from collections.abc import Callable


class Meter:
    """Counts tokens and reports their rate since the last report."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._recent_tokens = 0
        self.num_tokens = 0
        self.num_lost = 0

    def count(self, num_tokens: int) -> None:
        """Note tokens that were sampled."""
        self.num_tokens += num_tokens
        self._recent_tokens += num_tokens

    def report(self, *, in_flight: int, unacked: int, finished: int) -> dict[str, float]:
        """Return the figures since the last report and begin anew."""
        now = self._clock()
        rate = self._recent_tokens / max(now - self._since, 1e-3)
        self._since, self._recent_tokens = now, 0
        return {
            "tokens_per_s": rate,
            "tokens": float(self.num_tokens),
            "in_flight": float(in_flight),
            "unacked": float(unacked),
            "finished": float(finished),
            "lost": float(self.num_lost),
        }
