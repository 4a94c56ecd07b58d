"""When expired leases may be taken back.

Every broker reaps, without a leader: the store's REAP is idempotent. What must not happen is
that the time in which heartbeats could not arrive counts against the actors: a broker that was
down, a store that was unreachable, or a process that was stopped would expire every lease at
once. So each of these is followed by a grace of one lease timeout. No I/O; the clock is
injected.
"""

from __future__ import annotations

from collections.abc import Callable

BATCH = 256  # leases returned in one call: a few milliseconds of Redis


class Reaper:
    """Says whether to reap now."""

    def __init__(self, *, grace_s: float, clock: Callable[[], float]) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._looked_at = clock()
        self._quiet_until = clock() + grace_s

    def hold(self) -> None:
        """Begin a grace: heartbeats may have been lost."""
        self._quiet_until = self._clock() + self._grace_s

    def may_reap(self) -> bool:
        """Say whether leases that have expired did so although heartbeats could arrive."""
        now = self._clock()
        if now - self._looked_at > self._grace_s / 2:  # this process was stopped meanwhile
            self.hold()
        self._looked_at = now
        return now >= self._quiet_until
