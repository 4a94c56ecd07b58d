"""Calls of an environment's methods, which may be `async`, from a thread or from an event loop.

One coroutine makes the calls of an episode, whatever the environment is: in a thread it is driven
to its end without an event loop, and in an event loop it is awaited like any other. Each call
begins in `call`, so every call has a time limit of its own. An environment host imports this module
too: it needs no package.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from operator import attrgetter
from types import coroutine
from typing import Any, TypeVar

from configs.errors import DeadlineError
from configs.user_code import explain, user_code_place

from .base import Conversation, Environment

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """Makes an environment for a thread or an event loop, as often as one is needed."""

    make: Callable[[], Environment]
    is_async: bool = False
    """Its methods are awaited in an event loop of their own."""
    is_shared: bool = False
    """Its class has `is_thread_safe = True`: all threads use one."""

    @classmethod
    def from_environment(
        cls, environment: Environment, sample: Conversation, make: Callable[[], Environment]
    ) -> EnvironmentSource:
        """Read from an environment and one of its items how its methods are to be called."""
        methods = (environment.begin, sample.step, sample.score)
        return cls(
            make,
            is_async=needs_loop(environment, *methods),
            is_shared=bool(getattr(environment, "is_thread_safe", False)),
        )


def needs_loop(environment: Environment, *methods: Callable[..., object]) -> bool:
    """Whether these methods of an environment are to be awaited in an event loop."""
    is_async = getattr(environment, "is_async", False)
    return bool(is_async) or any(iscoroutinefunction(method) for method in methods)


async def call(
    function: Callable[..., T | Awaitable[T]], *args: Any, limit_s: float, **kwargs: Any
) -> T:
    """Call a method of an environment or a conversation, and return its result.

    Args:
        function: The method, which may be `async`.
        args: Its arguments.
        limit_s: Time limit of an `async` method; any other is bounded by `EnvironmentLanes.watch`.
        kwargs: Its keywords.

    Raises:
        DeadlineError: The method is `async` and did not end in time.
        Exception: The method raised it.
    """
    await _next_call()
    value = function(*args, **kwargs)
    if not isawaitable(value):
        return value
    within: Callable[[float], Coroutine[Any, Any, T]] | None = getattr(value, "within", None)
    if within is not None:  # a `HostedCall`, which does not count its wait for other calls
        return await within(limit_s)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await value
    except TimeoutError as error:
        if not limit.expired():
            raise
        stood = error.__cause__ or error.__context__ or error  # no cause before Python 3.11.4
        raise overdue(limit_s, explain(stood).partition(", at ")[2]) from error


def drive(work: Coroutine[Any, Any, T], on_call: Callable[[], object] = lambda: None) -> T:
    """Run a coroutine to its end in this thread, without an event loop.

    Args:
        work: The coroutine; calls no `async` method of an environment.
        on_call: Called before each call of the environment.
    """
    try:
        while True:
            work.send(None)
            on_call()
    except StopIteration as end:
        result: T = end.value
        return result


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of any environment in an event loop of its own, for checks."""
    return asyncio.run(work)


def present_place(thread: int | None) -> str:
    """Return the line of the user's code that a thread is in, or an empty text."""
    return user_code_place(traceback.extract_stack(sys._current_frames().get(thread or 0)))


FASTER = "make it faster, or raise actors.environment_timeout_s, the limit while actors sample"


def overdue(limit_s: float, place: str, *, beside: str = "", step: str = FASTER) -> DeadlineError:
    """Make the error of a call that takes too long.

    Args:
        limit_s: Time limit of the call.
        place: Line of the user's code where the call stands; may be empty.
        beside: What went wrong before, too.
        step: What the user can do.
    """
    return DeadlineError(
        f"run.environment must answer within {limit_s:g} s, got no "
        f"answer{', at ' if place else ''}{place}{beside}; {step}"
    )


@coroutine
def _next_call() -> Generator[None, None, None]:
    yield


# --------------------------------------------------------------------------------------------------
# Threads that call an environment, one episode each at a time, in the actor or in a host.
#
# A class that has `is_thread_safe = True` is made once, and its threads take whatever comes next; a
# thread more is started when all have been busy for a while. Any other class is made once for each
# thread, and an episode stays with the thread that began it.
#
# A call that takes too long has failed. Its thread is left behind and another takes its place;
# after a few that never end the environment is given up, since each may burn a core.

MAX_HUNG = 3  # threads left behind, and as many more as there are threads: each may burn a core
BUSY_S = 0.05  # all threads work on one call each for this long: another is started
MAKE_S = 60.0  # an environment may load a table


@dataclass(slots=True)
class EnvironmentCall:
    """Work on one episode, which may call its environment several times."""

    work: Callable[[LaneThread], Any]
    done: Callable[[Any], None]
    """Called from a thread with what the work returned or raised; once."""
    limit_s: float


class EnvironmentLane:
    """A queue of calls, the environment that they share, and the threads that serve it."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.make = make
        self.environment: Environment | None = None
        self.calls: queue.SimpleQueue[EnvironmentCall | None] = queue.SimpleQueue()
        self.threads: list[LaneThread] = []
        self.making = threading.Lock()

    @property
    def load(self) -> int:
        """Calls that wait or are under way."""
        return self.calls.qsize() + sum(thread.call is not None for thread in self.threads)


class EnvironmentLanes:
    """All lanes of an environment; `put_call` and `watch` may be called from two threads."""

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        num_threads: int,
        is_shared: bool,
        first: Environment | None = None,
    ) -> None:
        """Prepare; threads start when they are needed.

        Args:
            make: Makes an environment.
            num_threads: Most threads at once.
            is_shared: All threads use one environment.
            first: An environment that exists already.
        """
        self._lanes = [EnvironmentLane(make) for _ in range(1 if is_shared else num_threads)]
        self._lanes[0].environment = first
        self._num_threads = num_threads
        self._hung: list[LaneThread] = []

    def next_lane(self) -> EnvironmentLane:
        """Return the lane on which the fewest calls wait."""
        # Of equal lanes, the one that got an episode least recently: begins are quick, steps slow.
        lane = min(self._lanes, key=attrgetter("load"))
        self._lanes.remove(lane)
        self._lanes.append(lane)
        return lane

    def put_call(self, call: EnvironmentCall, lane: EnvironmentLane) -> None:
        """Queue a call; it is made when those before it on its lane are over."""
        if not lane.threads:
            LaneThread(lane)
        lane.calls.put(call)

    def watch(self) -> None:
        """Fail the calls that take too long, and start a thread where all are busy.

        The thread of such a call is left behind, and another takes its place.

        Raises:
            DeadlineError: `num_threads` + `MAX_HUNG` calls never end: it cannot be used.
        """
        now = time.monotonic()
        most = self._num_threads // len(self._lanes)
        for lane in list(self._lanes):
            for thread in [thread for thread in lane.threads if thread.is_overdue(now)]:
                self._leave(thread, now)
            busy = [thread.busy_s(now) > BUSY_S for thread in lane.threads]
            if busy and all(busy) and len(busy) < most and not lane.calls.empty():
                LaneThread(lane)

    def close(self) -> None:
        """Let threads end after the calls that are queued; waits for none of them."""
        for lane in self._lanes:
            for _ in lane.threads:
                lane.calls.put(None)

    def _leave(self, thread: LaneThread, now: float) -> None:
        """Leave a thread behind whose call takes too long."""
        place = present_place(thread.thread.ident)
        call = thread.abandon_call(now)
        if call is None:
            return
        self._hung = [hung for hung in [*self._hung, thread] if hung.thread.is_alive()]
        if len(self._hung) >= MAX_HUNG + self._num_threads:
            raise overdue(
                call.limit_s,
                place,
                beside=f", and {len(self._hung)} of its threads never end",
                step="bound the time of that call in the environment",
            )
        call.done(overdue(call.limit_s, place))


class LaneThread:
    """One thread of a lane, and what it works on; starts at once."""

    def __init__(self, lane: EnvironmentLane) -> None:
        self._lane = lane
        self.call: EnvironmentCall | None = None
        self._since = 0.0
        self._lock = threading.Lock()
        self._is_left = False
        self.thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        self.thread.start()
        lane.threads.append(self)

    @property
    def environment(self) -> Environment:
        """The lane's environment, made when it is first asked for."""
        self._since += MAKE_S
        with self._lane.making:
            if self._lane.environment is None:
                self._lane.environment = self._lane.make()
        self.begin_call()
        return self._lane.environment

    def begin_call(self) -> None:
        """Note the begin of a call of the environment."""
        self._since = time.monotonic()

    def busy_s(self, now: float) -> float:
        """Time that the present call has lasted; 0 between calls."""
        return now - self._since if self.call is not None else 0.0

    def is_overdue(self, now: float) -> bool:
        """Whether the present call lasts longer than its limit."""
        call = self.call
        return call is not None and now - self._since > call.limit_s

    def abandon_call(self, now: float) -> EnvironmentCall | None:
        """Start another thread in its place, and return its call; None if the call has ended."""
        with self._lock:
            call = self.call if self.is_overdue(now) else None
            self._is_left = call is not None
        if call is not None:
            LaneThread(self._lane)
            self._lane.threads.remove(self)
        return call

    def _serve(self) -> None:
        while (call := self._lane.calls.get()) is not None:
            self.begin_call()
            self.call = call
            try:
                value = call.work(self)
            except BaseException as error:  # noqa: BLE001 - foreign code; the caller judges
                value = error
            with self._lock:
                if self._is_left:
                    return
                self.call = None
            call.done(value)
