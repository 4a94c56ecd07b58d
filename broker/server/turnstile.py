"""Where LEASE requests wait for work: first come, first served, a few at a time.

The store cannot wake a broker when work becomes admissible, because that depends on the asker's
policy version and on what other brokers grant. So the first few in the row try again at every tick,
and each that is served lets the next one try at once. The row moves, so nobody waits behind one who
cannot be served. A try costs one Lua call, and none is made while nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

TICK_S = 0.1  # new work is noticed this soon
TRIES_PER_TICK = 16  # at most 160 calls a second, two per cent of what Redis does on one core


class Turnstile:
    """The row of waiting requests."""

    def __init__(self) -> None:
        self._row: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._row)

    async def wait(self, timeout_s: float) -> None:
        """Stand in the row until it is one's turn or the time is over."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._row.append(turn)
        try:
            await asyncio.wait([turn], timeout=timeout_s)
        finally:
            if not turn.done():
                self._row.remove(turn)

    def open(self, places: int = TRIES_PER_TICK) -> None:
        """Let the first ones try again."""
        for _ in range(min(places, len(self._row))):
            turn = self._row.popleft()
            if not turn.done():
                turn.set_result(None)
