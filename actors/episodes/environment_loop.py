"""Event loop of its own for an environment with `async` methods, in a thread.

All episodes wait side by side, however many they are. A method that blocks the loop without
`await` holds up the others; one that does so for longer than a call may last fails all that wait,
and an environment made anew goes on in a loop of its own.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from actors.environments.base import Environment
from actors.environments.calls import EnvironmentSource, overdue
from configs.errors import DeadlineError
from configs.own_code import own_place
from configs.worker import Worker

from .environment_job import Job

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
