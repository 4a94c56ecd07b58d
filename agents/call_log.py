"""Calls of a conversation: what is stored of each, and which of them a request joins.

Agents send their whole history with each call. A call is stored as the number of an earlier call,
its parent, the number of bytes that both begin with, and the rest. The parent is the call with the
longest common prefix, which need not be the last one: sub-agents and retried turns fork.

A request joins an earlier call instead of making one of its own if it has the same content, and

- both have the same `Idempotency-Key`; or
- the SDK calls it a retry (`X-Stainless-Retry-Count` above 0); or
- nobody waits for the earlier call's reply, and nobody has got it.

Two requests of the same content that wait side by side are two calls: an agent that asks several
times at once wants several answers.

Pure: neither the store nor the server is known here.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.protocol.agent_calls import AgentError, AgentReply
from buffer.operations.conversations import MAX_CALLS

from .requests import RequestError

KEPT_REPLIES = 32
"""Replies kept for retries: those of all calls that may be open at a time."""


class CallDelta(NamedTuple):
    """A call's body: the first `keep` bytes of its parent's body, then `tail`."""

    parent: int
    """Calls are numbered from 1; 0 = none."""
    keep: int
    tail: bytes


class CallLog:
    """The calls of one conversation, in order; holds no more bytes than the mailbox does.

    Example:
        >>> log = CallLog()
        >>> log.add(b"hello"), log.add(b"help")
        (CallDelta(parent=0, keep=0, tail=b'hello'), CallDelta(parent=1, keep=3, tail=b'p'))
    """

    def __init__(self) -> None:
        self._calls: list[CallDelta] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, number: int) -> CallDelta:
        return self._calls[number - 1]

    def add(self, body: bytes) -> CallDelta:
        """Append a call; return what is stored of it."""
        shared = [0]
        for call in self._calls:
            shared.append(self._shared_with(call, body, shared[call.parent]))
        keep = max(shared)
        delta = CallDelta(shared.index(keep) if keep else 0, keep, body[keep:])
        self._calls.append(delta)
        return delta

    def take_back(self) -> None:
        """Remove the last call, which the mailbox has refused."""
        self._calls.pop()

    @staticmethod
    def _shared_with(call: CallDelta, body: bytes, with_parent: int) -> int:
        """Count the bytes that a body shares with a call, by those it shares with its parent."""
        if with_parent != call.keep:
            # It leaves the parent before the call does; or after, where the call has other bytes.
            return min(with_parent, call.keep)
        return call.keep + common_prefix(body, call.keep, call.tail)


def common_prefix(body: bytes, start: int, tail: bytes) -> int:
    """Count the bytes of a body from `start` on that are equal to the first of a tail."""
    low, high = 0, min(len(body) - start, len(tail))
    if not body.startswith(tail[:1], start):  # as of most calls, which differ here
        return 0
    if body.startswith(tail[:high], start):
        return high
    while low + 1 < high:  # the first `low` bytes are equal, the first `high` are not
        middle = (low + high) // 2
        if body.startswith(tail[low:middle], start + low):
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class OpenCall:
    """A call that waits for its reply, or whose reply is kept."""

    number: int
    digest: bytes
    key: str
    """`Idempotency-Key` of its request."""
    reply: asyncio.Future[AgentReply]
    at: float = field(default_factory=time.time)
    num_requests: int = 1
    num_waiting: int = 0
    is_heard: bool = False
    """Whether a request has got the whole reply."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request that waits for the reply."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1


class OpenCalls:
    """Calls that wait for replies, and the last ones that have them."""

    def __init__(self) -> None:
        self._calls: dict[int, OpenCall] = {}
        self._refused: Counter[bytes] = Counter()
        """By digest, requests without a call whose SDKs send them again."""

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(tuple(self._calls.values()))

    @property
    def num_waiting(self) -> int:
        """Calls without a reply."""
        return sum(not call.reply.done() for call in self)

    def join(self, digest: bytes, key: str, *, is_retry: bool) -> OpenCall | None:
        """Return the earlier call that a request joins; None = it is a new one.

        Args:
            digest: Digest of its content.
            key: Its `Idempotency-Key`.
            is_retry: Whether the agent's SDK calls it a retry.

        Raises:
            RequestError: Its `Idempotency-Key` is that of a call of another content.
        """
        if is_retry and self._refused[digest]:
            self._refused[digest] -= 1  # a retry of a request that has no call
            return None
        call = self._with_key(digest, key) if key else self._unheard(digest, is_retry=is_retry)
        if call is not None:
            call.num_requests += 1
        return call

    def add(self, number: int, digest: bytes, key: str) -> OpenCall:
        """Add a call under its number, with a reply that is to come."""
        reply: asyncio.Future[AgentReply] = asyncio.get_running_loop().create_future()
        call = self._calls[number] = OpenCall(number, digest, key, reply)
        return call

    def answer(self, number: int, reply: AgentReply) -> None:
        """Give a reply to the requests that wait for it."""
        call = self._calls.get(number)
        if call is not None and not call.reply.done():
            call.reply.set_result(reply)

    def refuse(self, number: int) -> None:
        """Drop a call that the mailbox has refused."""
        call = self._calls.pop(number)
        self.note_refused(call.digest)
        if not call.reply.done():
            call.reply.set_result(AgentError(503, "the run has refused the call; try again"))

    def forget(self, call: OpenCall, *, is_retried: bool) -> None:
        """Drop a call that has no answer, so that no retry joins it.

        Args:
            call: The call.
            is_retried: Whether SDKs send its request again.
        """
        if self._calls.pop(call.number, None) is not None and is_retried:
            self.note_refused(call.digest)

    def note_refused(self, digest: bytes) -> None:
        """Remember a request without a call, whose retry is then a new one."""
        if len(self._refused) < MAX_CALLS:
            self._refused[digest] += 1

    def drop_oldest(self) -> None:
        """Drop the oldest replies beyond those that are kept."""
        answered = [call for call in self if call.reply.done()]
        for call in answered[: max(0, len(answered) - KEPT_REPLIES)]:
            if not call.num_waiting:
                del self._calls[call.number]

    def _with_key(self, digest: bytes, key: str) -> OpenCall | None:
        call = next((call for call in self if call.key == key), None)
        if call is not None and call.digest != digest:
            text = "Idempotency-Key must be new for another body, got one that was used"
            raise RequestError(422, text, code="idempotency_key_reused")
        return call

    def _unheard(self, digest: bytes, *, is_retry: bool) -> OpenCall | None:
        same = [call for call in self if call.digest == digest]
        unheard = [call for call in same if not call.num_waiting and not call.is_heard]
        candidates = unheard or (same if is_retry else [])
        # Retries of several equal calls go to a call each.
        return min(candidates, key=lambda call: (call.num_requests, call.number), default=None)
