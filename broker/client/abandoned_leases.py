"""Leases granted to a call that had given up: released at once instead of left to expire.

LEASE call --cancelled, or at its deadline--> abandoned --its reply arrives--> released

A reply that was lost with its broker never arrives: the next LEASE names the calls that wait for
one, and the store takes back what they were granted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

import structlog

from broker.protocol.messages import LeaseReply, ReleaseRequest, Verdicts
from configs.errors import DeadlineError, RefusedError

RELEASE_DEADLINE_S = 5.0  # after that the leases are left to expire

log = structlog.get_logger()


class Release(Protocol):
    """`BrokerClient.release`."""

    async def __call__(self, request: ReleaseRequest, *, deadline_s: float) -> Verdicts: ...


class AbandonedLeases:
    """LEASE calls of one client whose caller is gone."""

    def __init__(self, release: Release, *, max_calls: int) -> None:
        """Begin with none.

        Args:
            release: Gives leases back.
            max_calls: Calls to remember; beyond that the oldest are left to expire.
        """
        self._release = release
        self._calls: deque[int] = deque(maxlen=max_calls)
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def calls(self) -> tuple[int, ...]:
        """Their numbers, as long as they have no answer; it may have been lost."""
        return tuple(self._calls)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, seq: int, answer: asyncio.Future[object | None] | None) -> None:
        """Add a call that ends; its answer may be there already, unread."""
        reply = answer.result() if answer and answer.done() and not answer.cancelled() else None
        if isinstance(reply, LeaseReply):
            self._start_release(reply)
        else:  # a refusal says nothing of the copies before
            self._calls.append(seq)

    def on_reply(self, seq: int, message: object) -> None:
        """Release what a reply brings to an abandoned call; other replies are ignored."""
        if isinstance(message, LeaseReply) and seq in self._calls:
            self._calls.remove(seq)  # a second copy must not be released as well
            self._start_release(message)

    async def wait_released(self, timeout_s: float) -> None:
        """Wait until the leases of the replies so far are released."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel releases that are under way."""
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    def _start_release(self, reply: LeaseReply) -> None:
        if reply.leases:
            task = asyncio.create_task(self._release_all(reply))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release_all(self, reply: LeaseReply) -> None:
        tasks = tuple((lease.task_id, lease.fence) for lease in reply.leases)
        try:
            await self._release(ReleaseRequest(tasks), deadline_s=RELEASE_DEADLINE_S)
        except (DeadlineError, RefusedError) as error:
            log.warning("unused leases will expire", count=len(tasks), reason=str(error))
