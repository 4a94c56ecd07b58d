"""Calls of environments off the actor's event loop, for many episodes side by side.

    put --> a thread, or an event loop of their own --report--> serve --done--> the episode goes on

What an environment offers decides: `async` methods are awaited in one event loop, others are
called in threads. Waiting episodes hold no place in the engine, and a slow one holds up neither
leases nor heartbeats nor, but for those of its thread, other episodes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from actors.environments.base import Environment
from actors.environments.calls import EnvironmentSource
from configs.settings import ActorSettings

from .environment_job import Job
from .environment_loop import EnvironmentLoop
from .environment_threads import EnvironmentThreads
from .held_leases import HeldLease

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
