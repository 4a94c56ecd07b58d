"""Lanes of requests: heartbeats before work, late work shed; the clock that silence is measured by.

    arrives -> (waits, a queue for each holder, which have their turns) -> runs -> done
                  └── waited for `most_wait_s`, or behind one that did, or too many wait:
                      refused as `busy`, to be sent again later

The dispatcher offers what it reads to a lane, which has it answered or refused when its turn comes.

A broker that falls behind must refuse work while heartbeats still arrive: a queue of the length of
a heartbeat timeout would turn a live fleet SUSPECT, and leasing its work again would lengthen the
queue. Signs of life, registrations and operators have a lane of their own, so they wait neither for
a place nor behind records. No holder waits behind the queue of another: a holder of many keys has
one turn among the holders that wait. No I/O; the clock is injected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from broker.protocol.codec import Header
from broker.protocol.conversation_messages import ListenRequest, RepliesRequest
from broker.protocol.messages import BeatRequest, Bye, Hello
from broker.transport.allow_list import AllowListEntry
from buffer.operations.values import holder_of

from .flow_control import RequestSlot
from .validation import ADMIN_REQUESTS

MAX_RUNNING = 256  # hides a store round trip of 10 ms at 25 000 requests a second
MAX_WAITING = 4096  # some seconds of work; frames are bounded in bytes, too
PROMPT = frozenset(
    kind.__struct_config__.tag
    for kind in (Hello, BeatRequest, Bye, ListenRequest, RepliesRequest, *ADMIN_REQUESTS)
)
"""Requests that work must not hold up."""
SHARE_OF_TIMEOUT = 0.25
"""Share of `broker.heartbeat_timeout_s` that a request may wait, so that it can be repeated."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A message that was read and not yet answered."""

    route: bytes
    frame: memoryview | None
    """None once it is decoded: a LEASE that waits for work must not keep its frame alive."""
    header: Header
    key: str
    member: AllowListEntry
    slot: RequestSlot
    lane: RequestLane | None = None
    """The lane in which it runs; None = it does not run."""

    def release(self) -> None:
        """Give its place to another request; the second time does nothing."""
        self.slot.release()
        if self.lane is not None:
            lane, self.lane = self.lane, None
            lane.finished()


_Queue = OrderedDict[tuple[bytes, int], tuple[float, PendingRequest]]
"""Requests and their times of arrival by connection and number, the oldest first."""


class RequestLane:
    """Requests of one kind: at most `MAX_RUNNING` run, and `MAX_WAITING` wait."""

    def __init__(
        self,
        start: Callable[[PendingRequest], None],
        shed: Callable[[PendingRequest], None],
        *,
        most_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Begin empty.

        Args:
            start: Begins to answer a request, which calls `PendingRequest.release` in the end.
            shed: Refuses a request.
            most_wait_s: Longest wait.
            clock: Returns monotonic seconds.
        """
        self._start = start
        self._shed = shed
        self._most_wait_s = most_wait_s
        self._clock = clock
        self._running = 0
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        """Queues of the holders that wait, the next in turn first; no queue is empty."""
        self._num_waiting = 0

    def offer(self, request: PendingRequest) -> None:
        """Start a request, let it wait, refuse it by `shed`, or drop it silently.

        The copy of a waiting request is dropped: the waiting one will be answered or refused.
        """
        place, holder = (request.route, request.header.seq), holder_of(request.member.tag)
        queue = self._queues.get(holder)
        if self._running < MAX_RUNNING and not self._queues:
            self._run(request)
        elif queue is not None and place in queue:
            request.release()
        elif self._num_waiting >= MAX_WAITING or (queue is not None and self._has_late(queue)):
            self._shed(request)
        else:
            queue = self._queues.setdefault(holder, OrderedDict())
            queue[place] = self._clock(), request
            self._num_waiting += 1

    def finished(self) -> None:
        """Note the end of a running request, and let the next one run."""
        self._running -= 1
        self.advance()

    def advance(self) -> None:
        """Refuse requests that have waited too long, and start others while there is room."""
        for holder, queue in list(self._queues.items()):
            while queue and self._has_late(queue):
                self._shed(self._pop(holder))
        while self._queues and self._running < MAX_RUNNING:
            holder = next(iter(self._queues))
            request = self._pop(holder)
            if holder in self._queues:
                self._queues.move_to_end(holder)
            self._run(request)

    def _run(self, request: PendingRequest) -> None:
        self._running += 1
        request.lane = self
        self._start(request)

    def _pop(self, holder: str) -> PendingRequest:
        """Take the first request of a holder that waits."""
        queue = self._queues[holder]
        _, (_, request) = queue.popitem(last=False)
        self._num_waiting -= 1
        if not queue:
            del self._queues[holder]
        return request

    def _has_late(self, queue: _Queue) -> bool:
        """Return whether the first of a queue has waited too long."""
        arrived_at, _ = next(iter(queue.values()))
        return self._clock() - arrived_at > self._most_wait_s


class ReadingClock:
    """The time in which the broker read what arrived; it stands still while messages wait unread.

    The silence of actors is measured on it. An actor must not count as silent while the broker was
    stopped, or had so much to read that a heartbeat waited in the broker's own socket. The clock
    ticks when nothing is left to read. It also ticks when a connection has its next turn, because
    ZeroMQ reads connections in turn, so all others have had theirs.

    Args:
        clock: Returns monotonic seconds.
    """

    MOST_S = 0.5
    """Most time that a tick counts: the broker ticks more often unless it was stopped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ticked_at = clock()
        self._read_s = 0.0
        self._heard: set[bytes] = set()
        """Connections that were read since the last tick."""

    def __call__(self) -> float:
        """Return the seconds of reading so far, as of the last tick."""
        return self._read_s

    def hear(self, route: bytes) -> None:
        """Note a message of a connection."""
        if route in self._heard:
            self.tick()
        self._heard.add(route)

    def tick(self) -> None:
        """Count the time since the last tick: all messages of that time are read."""
        now = self._clock()
        self._read_s += min(now - self._ticked_at, self.MOST_S)
        self._ticked_at = now
        self._heard.clear()

    def late_s(self) -> float:
        """Return the seconds since the last tick, for which messages may have waited unread."""
        return self._clock() - self._ticked_at
