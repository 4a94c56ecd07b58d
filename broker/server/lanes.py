"""Lanes of requests: heartbeats never wait behind work, and work that would wait too long is shed.

    arrives -> (waits, first come first served) -> runs -> done
                  └── waited for `most_wait_s`, or would: refused as `busy`, to be sent again later

A broker that falls behind must say so while its actors are still heard: a queue of the length of a
heartbeat timeout would turn a live fleet SUSPECT, and leasing its work again would lengthen the
queue. Signs of life, registrations and operators have a lane of their own, so they wait neither for
a place nor behind records. No I/O; the clock is injected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from broker.protocol.messages import BeatRequest, Bye, Hello
from broker.transport.allow_list import Member

from .flow_control import Slot
from .permissions import ADMIN_REQUESTS

MAX_RUNNING = 256  # hides a store round trip of 10 ms at 25 000 requests a second
MAX_WAITING = 4096  # some seconds of work; with their frames they are bounded in bytes, too
PROMPT = frozenset(
    kind.__struct_config__.tag for kind in (Hello, BeatRequest, Bye, *ADMIN_REQUESTS)
)
"""Requests that work must not hold up."""
SHARE_OF_TIMEOUT = 0.25
"""Of `broker.heartbeat_timeout_s`, that a request may wait: a refused one comes again within it."""


@dataclass(slots=True, eq=False)
class Request:
    """A message that was read and not yet answered."""

    route: bytes
    frame: memoryview | None
    """None once it is decoded: a LEASE that waits for work must not keep its frame alive."""
    seq: int
    key: str
    member: Member
    slot: Slot
    lane: Lane | None = None
    """While it runs."""

    def release(self) -> None:
        """Make room for another; the second time does nothing."""
        self.slot.release()
        if self.lane is not None:
            lane, self.lane = self.lane, None
            lane.finished()


class Lane:
    """Requests of one kind: some run, the others wait."""

    def __init__(
        self,
        start: Callable[[Request], None],
        shed: Callable[[Request], None],
        *,
        most_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Begin empty.

        Args:
            start: Begins to answer a request, which calls `Request.release` in the end.
            shed: Refuses one.
            most_wait_s: Longest wait.
            clock: Seconds.
        """
        self._start = start
        self._shed = shed
        self._most_wait_s = most_wait_s
        self._clock = clock
        self._running = 0
        self._waiting: OrderedDict[tuple[bytes, int], tuple[float, Request]] = OrderedDict()

    def offer(self, request: Request) -> None:
        """Start a request, let it wait, or shed it."""
        place = request.route, request.seq
        if self._running < MAX_RUNNING and not self._waiting:
            self._run(request)
        elif place in self._waiting:
            request.release()  # a copy of one that waits: that one's answer is its answer
        elif len(self._waiting) >= MAX_WAITING or self._is_late(self._oldest_at):
            self._shed(request)
        else:
            self._waiting[place] = self._clock(), request

    def finished(self) -> None:
        """Let the next one run."""
        self._running -= 1
        self.advance()

    def advance(self) -> None:
        """Shed what has waited too long, and start what there is room for."""
        while self._waiting and (self._running < MAX_RUNNING or self._is_late(self._oldest_at)):
            _, (arrived_at, request) = self._waiting.popitem(last=False)
            (self._shed if self._is_late(arrived_at) else self._run)(request)

    def _run(self, request: Request) -> None:
        self._running += 1
        request.lane = self
        self._start(request)

    @property
    def _oldest_at(self) -> float:
        """When the first of those that wait arrived."""
        return next(iter(self._waiting.values()))[0] if self._waiting else self._clock()

    def _is_late(self, arrived_at: float) -> bool:
        return self._clock() - arrived_at > self._most_wait_s


class ReadingClock:
    """The time in which the broker read its socket; it stands still while it could hear nobody.

    Silence is measured on it: a process that was stopped must not count against the actors that
    they were not heard.

    Args:
        clock: Seconds.
    """

    MOST_S = 0.5  # between two ticks; what is longer was no reading

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ticked_at = clock()
        self._read_s = 0.0

    def __call__(self) -> float:
        """Return the seconds of reading so far, as of the last tick."""
        return self._read_s

    def tick(self) -> None:
        """Count the time since the last tick, some times a second."""
        now = self._clock()
        self._read_s += min(now - self._ticked_at, self.MOST_S)
        self._ticked_at = now
