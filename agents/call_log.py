"""Log of a conversation's calls, each stored as what follows the prefix it shares with another.

Agents send their whole history with each call. A call is stored as the number of an earlier call,
its parent, the number of bytes that both begin with, and the rest. The parent is the call with the
longest common prefix, which need not be the last one: sub-agents and retried turns fork.

Pure: neither the store nor HTTP is known here.
"""

from __future__ import annotations

from typing import NamedTuple


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
