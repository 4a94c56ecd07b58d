"""Calls of environments off the actor's event loop, for many episodes side by side.

    put --> a thread, or an event loop of their own --report--> serve --done--> the episode goes on

What an environment offers decides: `async` methods are awaited in one event loop, others are
called in threads. Waiting episodes hold no place in the engine, and a slow one holds up neither
leases nor heartbeats nor, but for those of its thread, other episodes.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from actors.environments.base import Environment
from actors.environments.calls import EnvironmentSource, drive, overdue
from configs.errors import DeadlineError
from configs.own_code import own_place
from configs.settings import ActorSettings
from configs.worker import Worker

from .held_leases import HeldLease

# --------------------------------------------------------------------------------------------------
# A piece of work on one episode that calls its environment.


@dataclass(eq=False, slots=True)
class Job:
    """Work in an environment's thread or event loop."""

    work: Callable[[Environment], Coroutine[Any, Any, Any]]
    done: Callable[[Any], None]
    """Called in the actor's event loop with what the work returned or raised."""
    is_over: bool = False
    """`done` was called; what comes later is dropped."""


# --------------------------------------------------------------------------------------------------
# Event loop of its own for an environment with `async` methods, in a thread.
#
# All episodes wait side by side, however many they are. A method that blocks the loop without
# `await` holds up the others; one that does so for longer than a call may last fails all that wait,
# and an environment made anew goes on in a loop of its own.

MAX_BLOCKED = 3  # loops left behind: each may burn a core
MAKE_S = 60.0  # an environment may load a table


class EnvironmentLoop:
    """Does jobs in an event loop; `report` is called from its thread."""

    def __init__(
        self, source: EnvironmentSource, *, limit_s: float, report: Callable[[Job, Any], None]
    ) -> None:
        self._source = source
        self._limit_s = limit_s
        self._report = report
        self._thread: _LoopThread | None = None
        self._num_blocked = 0

    def put(self, job: Job, place: object | None) -> object:
        """Do a job in the loop that began its episode, or in the present one; return the loop."""
        thread = place if isinstance(place, _LoopThread) else self._thread
        if thread is None:
            thread = self._thread = _LoopThread(self._source, self._report)
        thread.put(job)
        return thread

    def watch(self) -> None:
        """Leave a loop that is blocked behind.

        Raises:
            DeadlineError: Too many were.
        """
        thread = self._thread
        if thread is None or not thread.is_blocked(self._limit_s):
            return
        self._thread = None
        self._num_blocked += 1
        place = own_place(traceback.extract_stack(sys._current_frames().get(thread.ident)))
        error = overdue(self._limit_s, place)
        if self._num_blocked > MAX_BLOCKED:
            raise DeadlineError(f"{error}; its event loop was blocked for so long before")
        for job in list(thread.jobs):
            self._report(job, error)

    def close(self) -> None:
        """End the loop."""
        if self._thread is not None:
            self._thread.end()


class _LoopThread:
    """A thread with an event loop and an environment."""

    def __init__(self, source: EnvironmentSource, report: Callable[[Job, Any], None]) -> None:
        self._source = source
        self._report = report
        self._environment: Environment | None = None
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._answered_at = time.monotonic() + MAKE_S
        self._is_asked = False
        self.ident = 0
        self.jobs: dict[Job, asyncio.Task[None] | None] = {}
        Worker(self._run, name="environment").start()

    def put(self, job: Job) -> None:
        """Begin a job."""
        self.jobs[job] = None
        self._loop.call_soon_threadsafe(self._begin, job)

    def is_blocked(self, limit_s: float) -> bool:
        """Whether the loop has not turned for so long."""
        if not self._is_asked:
            self._is_asked = True
            self._answered_at = max(self._answered_at, time.monotonic())
            self._loop.call_soon_threadsafe(self._answer)
        return time.monotonic() - self._answered_at > limit_s

    def end(self) -> None:
        """Let the thread end."""
        self._loop.call_soon_threadsafe(self._ended.set)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended.wait())

    def _answer(self) -> None:
        self._answered_at, self._is_asked = time.monotonic(), False

    def _begin(self, job: Job) -> None:
        self.jobs[job] = self._loop.create_task(self._work(job))

    async def _work(self, job: Job) -> None:
        try:
            if self._environment is None:
                self._environment = self._source.make()
            result = await job.work(self._environment)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; the caller judges
            result = error
        self.jobs.pop(job, None)
        self._report(job, result)


# --------------------------------------------------------------------------------------------------
# Threads that call an environment, one episode each at a time.
#
# A class that has `is_thread_safe = True` is made once, and its threads take whatever comes next; a
# thread more is started when all have been busy for a while. Any other class is made once for each
# thread, and an episode stays with the thread that began it.
#
# A call that takes too long has failed. Its thread is left behind and another takes its place;
# after a few that never end the environment is given up, since each may burn a core.

MAX_HUNG = 3  # threads left behind, and as many more as there are threads: each may burn a core
BUSY_S = 0.05  # all threads work on one call each for this long: another is started


class Lane:
    """A queue of episodes, the environment that they share, and the threads that serve it."""

    def __init__(self, environment: Environment | None) -> None:
        self.environment = environment
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.threads: list[_Thread] = []
        self.making = threading.Lock()

    @property
    def load(self) -> int:
        """Episodes that wait or are called."""
        return self.jobs.qsize() + sum(thread.job is not None for thread in self.threads)


class EnvironmentThreads:
    """Does jobs in threads; `report` is called from them."""

    def __init__(
        self,
        source: EnvironmentSource,
        *,
        num_workers: int,
        limit_s: float,
        report: Callable[[Job, Any], None],
    ) -> None:
        self._source = source
        self._num_workers = num_workers
        self._limit_s = limit_s
        self._report = report
        self._lanes = [Lane(None) for _ in range(1 if source.is_shared else num_workers)]
        self._threads_per_lane = num_workers if source.is_shared else 1
        self._hung: list[_Thread] = []

    def put(self, job: Job, place: object | None) -> object:
        """Do a job where its episode was begun, or where the fewest wait; return the place."""
        lane = place if isinstance(place, Lane) else self._next_lane()
        lane.jobs.put(job)
        if not lane.threads:
            self._start(lane)
        return lane

    def watch(self) -> None:
        """Fail the calls that take too long, and start a thread where all are busy.

        Raises:
            DeadlineError: Too many never end: the environment cannot be worked with.
        """
        now = time.monotonic()
        for lane in self._lanes:
            for thread in [each for each in lane.threads if each.is_overdue(now, self._limit_s)]:
                self._leave(lane, thread)
            busy = [each.busy_s(now) > BUSY_S for each in lane.threads]
            if all(busy) and len(busy) < self._threads_per_lane and not lane.jobs.empty():
                self._start(lane)

    def close(self) -> None:
        """End the threads that wait."""
        for lane in self._lanes:
            for _ in lane.threads:
                lane.jobs.put(None)

    def _next_lane(self) -> Lane:
        # Of those alike the one that got an episode least recently: quick begins, slow steps.
        lane = min(self._lanes, key=lambda each: each.load)
        self._lanes.remove(lane)
        self._lanes.append(lane)
        return lane

    def _start(self, lane: Lane) -> None:
        thread = _Thread()
        lane.threads.append(thread)
        thread.worker = Worker(partial(self._serve, lane, thread), name="environment").start()

    def _serve(self, lane: Lane, thread: _Thread) -> None:
        thread.ident = threading.get_ident()
        while (job := lane.jobs.get()) is not None:
            thread.begin(job)
            try:
                work = job.work(self._environment(lane, thread))
                result = drive(work, partial(thread.begin, job))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; the caller judges
                result = error
            if not thread.end():
                return
            self._report(job, result)

    def _environment(self, lane: Lane, thread: _Thread) -> Environment:
        with lane.making:
            if lane.environment is None:
                thread.since += MAKE_S
                lane.environment = self._source.make()
        thread.since = time.monotonic()
        return lane.environment

    def _leave(self, lane: Lane, thread: _Thread) -> None:
        """Leave a thread behind whose call takes too long."""
        place = own_place(traceback.extract_stack(sys._current_frames().get(thread.ident)))
        job = thread.leave()
        if job is None:
            return  # it has just ended
        lane.threads.remove(thread)
        self._start(lane)
        self._hung = [each for each in [*self._hung, thread] if each.worker.is_alive]
        error = overdue(self._limit_s, place)
        if len(self._hung) >= MAX_HUNG + self._num_workers:
            raise DeadlineError(f"{error}; {len(self._hung)} of its threads never end")
        self._report(job, error)


class _Thread:
    """One thread of a lane, and what it works on."""

    worker: Worker
    ident = 0

    def __init__(self) -> None:
        self.job: Job | None = None
        self.since = 0.0
        self._lock = threading.Lock()
        self._is_left = False

    def begin(self, job: Job) -> None:
        """Note the begin of a call."""
        self.job, self.since = job, time.monotonic()

    def end(self) -> bool:
        """Note the end of a job; False = it was left behind."""
        with self._lock:
            self.job = None
            return not self._is_left

    def leave(self) -> Job | None:
        """Leave the thread behind, and return its job, unless that has ended."""
        with self._lock:
            self._is_left = self.job is not None
            return self.job

    def busy_s(self, now: float) -> float:
        """How long the call at hand has lasted."""
        return now - self.since if self.job is not None else 0.0

    def is_overdue(self, now: float, limit_s: float) -> bool:
        """Whether the call at hand lasts longer than it may."""
        return self.busy_s(now) > limit_s


# --------------------------------------------------------------------------------------------------
# Calls of environments off the actor's event loop, for many episodes side by side.

TICK_S = 0.05  # between looks at calls that take long


class Callers(Protocol):
    """`EnvironmentThreads` or `EnvironmentLoop`."""

    def put(self, job: Job, place: object | None) -> object: ...

    def watch(self) -> None: ...

    def close(self) -> None: ...


class EnvironmentWorkers:
    """Does work that calls an environment; each of the run's has callers of its own.

    Example:
        workers.open([source])
        tasks.create_task(workers.serve())
        workers.put(held, lambda environment: maker.begin(lease, environment), done)
    """

    def __init__(self, settings: ActorSettings) -> None:
        """Prepare; `open` starts."""
        self._num_workers = settings.environment_workers
        self._limit_s = settings.environment_timeout_s
        self._callers: list[Callers] = []
        self._loop: asyncio.AbstractEventLoop
        self._arrived = asyncio.Event()
        self._reports: deque[tuple[Job, Any]] = deque()
        self._is_woken = False
        self._num_open = 0

    def open(self, sources: Sequence[EnvironmentSource]) -> None:
        """Take work from now on, for these environments."""
        self._loop = asyncio.get_running_loop()
        self._callers = [self._callers_of(source) for source in sources]

    def put(
        self,
        held: HeldLease,
        work: Callable[[Environment], Coroutine[Any, Any, Any]],
        done: Callable[[Any], None],
    ) -> None:
        """Do a piece of work, and call `done` with what it returned or raised."""
        self._num_open += 1
        callers = self._callers[held.environment]
        held.place = callers.put(Job(work, done), held.place)
        self._arrived.set()

    async def serve(self) -> None:
        """Hand on what is done, until cancelled.

        Raises:
            DeadlineError: The environment hangs again and again.
        """
        try:
            while True:
                self._arrived.clear()
                self._is_woken = False
                while self._reports:
                    self._settle(*self._reports.popleft())
                for callers in self._callers:
                    callers.watch()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S if self._num_open else None):
                        await self._arrived.wait()
        finally:
            for callers in self._callers:
                callers.close()

    def _callers_of(self, source: EnvironmentSource) -> Callers:
        if source.is_async:
            return EnvironmentLoop(source, limit_s=self._limit_s, report=self._report)
        return EnvironmentThreads(
            source, num_workers=self._num_workers, limit_s=self._limit_s, report=self._report
        )

    def _settle(self, job: Job, result: Any) -> None:
        if not job.is_over:
            job.is_over = True
            self._num_open -= 1
            job.done(result)

    def _report(self, job: Job, result: Any) -> None:
        """Take a result from any thread; the event loop is woken once for all that wait."""
        self._reports.append((job, result))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the actor has ended meanwhile
                self._loop.call_soon_threadsafe(self._arrived.set)
