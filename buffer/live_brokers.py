"""Live brokers of a run, from the figures that each leaves in the store.

Clocks of other machines are not used: a broker is live as long as its figures change. A broker that
stopped in order leaves its figures with `at: 0`. Brokers and the learner look for them, and tell
actors their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

FORGOTTEN_S = 10.0
"""Time without a change after which a broker is not live: five missed reports."""
STOPPED = {"at": 0.0}
"""Figures of a broker that no longer serves."""


class LiveBrokers:
    """Remembers when the figures of each broker last changed."""

    def __init__(self, *, at_most: int, clock: Callable[[], float]) -> None:
        """Begin without brokers.

        Args:
            at_most: Most brokers to return; those that changed last are preferred.
            clock: Returns monotonic seconds.
        """
        self._at_most = at_most
        self._clock = clock
        self._changed: dict[str, tuple[float, float]] = {}
        """Endpoint -> (`at` of its figures, time at which this process first read that value)."""

    def observe(self, stored: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
        """Return the addresses of live brokers, by the figures that the store has of each.

        A broker that is new to this process counts as live until its figures stand still.
        """
        now = self._clock()
        before, self._changed = self._changed, {}
        for endpoint, figures in stored.items():
            at = figures.get("at", 0.0)
            earlier = before.get(endpoint, (at, now))
            self._changed[endpoint] = earlier if earlier[0] == at else (at, now)
        living = [
            (changed, endpoint)
            for endpoint, (at, changed) in self._changed.items()
            if at and now - changed <= FORGOTTEN_S
        ]
        newest = sorted(living, key=lambda broker: (-broker[0], broker[1]))[: self._at_most]
        return tuple(sorted(endpoint for _, endpoint in newest))
