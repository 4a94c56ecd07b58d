"""Health of a process, as others see it: whether its loop turns, and whether it can work.

Asked from the thread of the HTTP server, so that a loop that hangs cannot answer for itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

BEAT_S = 1.0
LOOP_STALLED_S = 60.0  # imports of an engine, which hold every thread up, take less


class Pulse:
    """The last turn of a loop. Alive from the start until the first turn, however long that takes.

    Args:
        limit_s: Longest time between two turns.
        clock: Seconds.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._at: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there has been a turn."""
        return self._at is not None

    def beat(self) -> None:
        """Note a turn."""
        self._at = self._clock()

    async def keep(self) -> None:
        """Beat in the running event loop until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)

    def fault(self) -> str | None:
        """Describe a loop that hangs; None while it turns."""
        silent_s = 0.0 if self._at is None else self._clock() - self._at
        if silent_s <= self._limit_s:
            return None
        return f"the loop has not turned for {silent_s:.0f} s, limit {self._limit_s:g} s"


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one process."""

    pulse: Pulse
    waits_for: Callable[[], str | None]
    """What it waits for before it can work; None = for nothing but work."""

    def not_alive(self) -> str | None:
        """Say why the process should be ended; None if it should not."""
        return self.pulse.fault()

    def not_ready(self) -> str | None:
        """Say why nobody should count on the process now; None if they can."""
        if (fault := self.pulse.fault()) is not None:
            return fault
        waits_for = self.waits_for()
        return None if waits_for is None else f"waits for {waits_for}"
