"""Brokers of a run that serve now, from the figures that each leaves in the store.

No clock of another machine is believed: a broker serves as long as its figures change. One that
stopped in order leaves them with `at: 0`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

FORGOTTEN_S = 10.0
"""Five reports missed."""
STOPPED = {"at": 0.0}
"""Figures of a broker that no longer serves."""


class LiveBrokers:
    """Remembers when the figures of each broker last changed."""

    def __init__(self, *, at_most: int, clock: Callable[[], float]) -> None:
        """Know of none.

        Args:
            at_most: Brokers that are named; of more, those that changed last.
            clock: Seconds.
        """
        self._at_most = at_most
        self._clock = clock
        self._changed: dict[str, tuple[float, float]] = {}
        """Endpoint -> (`at` of its figures, when this process first read that)."""

    def observe(self, found: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
        """Take what the store has of each broker; return the addresses of those that serve.

        One that is new to this process counts as serving until its figures stand still.
        """
        now = self._clock()
        before, self._changed = self._changed, {}
        for endpoint, figures in found.items():
            at = figures.get("at", 0.0)
            known = before.get(endpoint, (at, now))
            self._changed[endpoint] = known if known[0] == at else (at, now)
        living = [
            (changed, endpoint)
            for endpoint, (at, changed) in self._changed.items()
            if at and now - changed <= FORGOTTEN_S
        ]
        newest = sorted(living, key=lambda each: (-each[0], each[1]))[: self._at_most]
        return tuple(sorted(endpoint for _, endpoint in newest))
