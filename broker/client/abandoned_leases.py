"""Leases that were granted to a call which had given up: they are given back, not left to expire.

LEASE call --cancelled, or at its deadline--> abandoned --its reply comes--> given back
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

from broker.protocol.messages import LeaseReply


class Orphans:
    """The LEASE calls of one client that nobody waits for any more."""

    def __init__(
        self, give_back: Callable[[LeaseReply], Coroutine[object, object, None]], *, most: int
    ) -> None:
        """Begin with none.

        Args:
            give_back: Releases the leases of a reply.
            most: Calls to remember; beyond that the oldest are left to expire.
        """
        self._give_back = give_back
        self._abandoned: deque[int] = deque(maxlen=most)
        self._tasks: set[asyncio.Task[None]] = set()

    def abandon(self, seq: int, answer: asyncio.Future[object | None] | None) -> None:
        """Take over a call; its answer may be there already, unread by the call that ends."""
        if answer is None or not answer.done() or answer.cancelled():
            self._abandoned.append(seq)
        elif isinstance(reply := answer.result(), LeaseReply):
            self._begin(reply)

    def take(self, seq: int, message: object) -> None:
        """Give back what a reply brings to an abandoned call; any other reply is of no interest."""
        if isinstance(message, LeaseReply) and seq in self._abandoned:
            self._abandoned.remove(seq)  # a second copy must not be given back as well
            self._begin(message)

    def __bool__(self) -> bool:
        return bool(self._abandoned)

    async def settle(self, timeout_s: float) -> None:
        """Wait until what has come so far is given back."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Stop giving back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reply: LeaseReply) -> None:
        if reply.leases:
            task = asyncio.create_task(self._give_back(reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
