"""How much the broker takes in at once: bounds on requests and bytes between socket and store.

When the whole is full the server stops reading; ZeroMQ's queues fill, then TCP holds the senders
back. A peer that is over its own share is refused before that, so that it cannot fill the whole: it
is told to send again later, and all others go on. A LEASE that waits for work is outside: it is a
few hundred bytes, and each actor has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

MAX_REQUESTS = 256  # hides a store round trip of 10 ms at 25 000 requests a second
MAX_REQUESTS_PER_PEER = 64  # a client keeps half of that in flight, and a copy of each may follow
MAX_FRAMES = 4  # largest messages held at once, so memory <= this * max_message_bytes


@dataclass(slots=True)
class _Share:
    """What one peer has in the intake."""

    requests: int = 0
    num_bytes: int = 0


class Intake:
    """Counts requests between `admit` and the end of their place.

    Args:
        max_message_bytes: Largest message.
        max_peer_bytes: Share of one peer. A single message of any size always fits.
    """

    def __init__(self, *, max_message_bytes: int, max_peer_bytes: int) -> None:
        self._max_bytes = MAX_FRAMES * max_message_bytes
        self._max_peer_bytes = max_peer_bytes
        self._requests = 0
        self._bytes = 0
        self._shares: dict[bytes, _Share] = {}
        self._room = asyncio.Event()
        self._room.set()

    @property
    def has_room(self) -> bool:
        """Whether another request may be read."""
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until another request may be read; for the one task that reads."""
        await self._room.wait()

    def admit(self, num_bytes: int, peer: bytes) -> Place | None:
        """Count a request that was just read, before anything else may run.

        Returns:
            Its place; None if its peer has too much in here already.
        """
        share = self._shares.get(peer)
        if share is None:
            share = self._shares[peer] = _Share()
        elif (
            share.requests >= MAX_REQUESTS_PER_PEER
            or share.num_bytes + num_bytes > self._max_peer_bytes
        ):
            return None
        share.requests += 1
        share.num_bytes += num_bytes
        self._count(1, num_bytes)
        return Place(lambda: self._give_back(peer, num_bytes))

    def _give_back(self, peer: bytes, num_bytes: int) -> None:
        share = self._shares[peer]
        share.requests -= 1
        share.num_bytes -= num_bytes
        if not share.requests:
            del self._shares[peer]
        self._count(-1, -num_bytes)

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
