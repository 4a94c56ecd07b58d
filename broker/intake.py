"""How much the broker takes in at once: a bound on requests and bytes between socket and store.

When it is reached the server stops reading; ZeroMQ's queues fill, then TCP holds the senders back.
A LEASE that waits for work is outside: it is a few hundred bytes, and each actor has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MAX_REQUESTS = 256  # hides a store round trip of 10 ms at 25 000 requests a second
MAX_FRAMES = 4  # largest messages held at once, so memory <= this * max_message_bytes


class Intake:
    """Counts requests between `admit` and the end of their place."""

    def __init__(self, *, max_message_bytes: int) -> None:
        self._max_bytes = MAX_FRAMES * max_message_bytes
        self._requests = 0
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def has_room(self) -> bool:
        """Whether another request may be read."""
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until another request may be read; for the one task that reads."""
        await self._room.wait()

    def admit(self, num_bytes: int) -> Place:
        """Count a request that was just read, before anything else may run."""
        self._count(1, num_bytes)
        return Place(lambda: self._count(-1, -num_bytes))

    def _count(self, requests: int, num_bytes: int) -> None:
        self._requests += requests
        self._bytes += num_bytes
        if self._requests >= MAX_REQUESTS or self._bytes >= self._max_bytes:
            self._room.clear()
        else:
            self._room.set()


class Place:
    """One request's share of the intake."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def leave(self) -> None:
        """Give the share back; once it is back, this does nothing."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None
