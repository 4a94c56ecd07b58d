"""Calls of environments off the actor's event loop, for many episodes side by side.

    submit_work --> a thread, or a loop of their own --report--> serve --done--> the episode goes on

`Sampling` submits the start of an episode, `Scoring` the judgement of a turn. What an environment
offers decides: `async` methods are awaited in one event loop, others are called in threads. Waiting
episodes hold no place in the engine, and a slow one holds up neither leases nor heartbeats nor, but
for those of its thread, other episodes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from actors.environments.base import Environment
from actors.environments.calls import (
    MAKE_S,
    EnvironmentCall,
    EnvironmentLane,
    EnvironmentLanes,
    EnvironmentSource,
    LaneThread,
    drive,
    overdue,
    present_place,
)
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
    """`done` was called; a later result is dropped."""


# --------------------------------------------------------------------------------------------------
# Event loop of its own for an environment with `async` methods, in a thread.
#
# All episodes wait side by side, however many they are. A method that blocks the loop without
# `await` holds up the others; one that does so for longer than a call may last fails all that wait,
# and an environment made anew goes on in a loop of its own.

MAX_BLOCKED = 3  # loops left behind: each may burn a core


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

    def put_job(self, job: Job, place: object | None) -> object:
        """Do a job in the loop that began its episode, or in the present one; return the loop."""
        thread = place if isinstance(place, _LoopThread) else self._thread
        if thread is None:
            thread = self._thread = _LoopThread(self._source, self._report)
        thread.begin_job(job)
        return thread

    def watch(self) -> None:
        """Leave a loop that is blocked behind; all its jobs get an error.

        Raises:
            DeadlineError: Too many loops were left behind.
        """
        thread = self._thread
        if thread is None or not thread.is_blocked(self._limit_s):
            return
        self._thread = None
        self._num_blocked += 1
        place = present_place(thread.ident)
        if self._num_blocked > MAX_BLOCKED:
            raise overdue(
                self._limit_s,
                place,
                beside=f", and {self._num_blocked} blocked event loops",
                step="await slow work in its async methods, or move it into asyncio.to_thread",
            )
        error = overdue(self._limit_s, place)
        for job in list(thread.jobs):
            self._report(job, error)

    def close(self) -> None:
        """End the present event loop."""
        if self._thread is not None:
            self._thread.end_loop()


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

    def begin_job(self, job: Job) -> None:
        """Begin a job in the loop."""
        self.jobs[job] = None
        self._loop.call_soon_threadsafe(self._begin, job)

    def is_blocked(self, limit_s: float) -> bool:
        """Whether the loop has not answered for longer than `limit_s`."""
        if not self._is_asked:
            self._is_asked = True
            self._answered_at = max(self._answered_at, time.monotonic())
            self._loop.call_soon_threadsafe(self._answer)
        return time.monotonic() - self._answered_at > limit_s

    def end_loop(self) -> None:
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
        self._lanes = EnvironmentLanes(
            source.make, num_threads=num_workers, is_shared=source.is_shared
        )
        self._limit_s = limit_s
        self._report = report
        self.watch, self.close = self._lanes.watch, self._lanes.close

    def put_job(self, job: Job, place: object | None) -> object:
        """Do a job where its episode was begun, or where the fewest wait; return the place."""
        lane = place if isinstance(place, EnvironmentLane) else self._lanes.next_lane()
        self._lanes.put_call(
            EnvironmentCall(partial(_work, job), partial(self._report, job), self._limit_s), lane
        )
        return lane


def _work(job: Job, thread: LaneThread) -> Any:
    return drive(job.work(thread.environment), thread.begin_call)


# --------------------------------------------------------------------------------------------------
# Calls of environments off the actor's event loop, for many episodes side by side.

TICK_S = 0.05  # between looks at calls that take long


class Callers(Protocol):
    """Callers of one environment: `EnvironmentThreads` or `EnvironmentLoop`."""

    def put_job(self, job: Job, place: object | None) -> object: ...

    def watch(self) -> None: ...

    def close(self) -> None: ...


class EnvironmentWorkers:
    """Does work that calls an environment; each environment of the run has its own callers.

    Example:
        workers.open([source])
        tasks.create_task(workers.serve())
        workers.submit_work(held, lambda env: maker.begin_episode(lease, env), done)
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
        """Accept work for these environments from now on."""
        self._loop = asyncio.get_running_loop()
        self._callers = [self._callers_of(source) for source in sources]

    def submit_work(
        self,
        held: HeldLease,
        work: Callable[[Environment], Coroutine[Any, Any, Any]],
        done: Callable[[Any], None],
    ) -> None:
        """Do a piece of work, and call `done` with what it returned or raised.

        `done` is called once, by `serve` in the actor's event loop. Work that takes longer than
        `actors.environment_timeout_s` fails with a `DeadlineError`; its thread or loop is left
        behind.
        """
        self._num_open += 1
        callers = self._callers[held.environment]
        held.place = callers.put_job(Job(work, done), held.place)
        self._arrived.set()

    async def serve(self) -> None:
        """Pass each result to its caller, until cancelled.

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
