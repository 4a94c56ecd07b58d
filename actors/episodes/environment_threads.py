"""Threads that call an environment, one episode each at a time.

A class that has `is_thread_safe = True` is made once, and its threads take whatever comes next; a
thread more is started when all have been busy for a while. Any other class is made once for each
thread, and an episode stays with the thread that began it.

A call that takes too long has failed. Its thread is left behind and another takes its place; after
a few that never end the environment is given up, since each may burn a core.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from actors.environments.base import Environment
from actors.environments.calls import EnvironmentSource, drive, overdue
from configs.errors import DeadlineError
from configs.own_code import own_place
from configs.worker import Worker

from .environment_job import Job

MAX_HUNG = 3  # threads left behind, and as many more as there are threads: each may burn a core
BUSY_S = 0.05  # all threads work on one call each for this long: another is started
MAKE_S = 60.0  # an environment may load a table


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
