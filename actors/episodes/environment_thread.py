"""The thread of an environment, off the event loop and with a time limit for each item.

One daemon thread: an environment need not be thread-safe, and one that hangs does not keep the
process from ending. An item that takes too long fails, its thread is left behind, and a new one
goes on with the next item; after a few of these the environment is given up, since threads left
behind may burn a core each.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from configs.errors import DeadlineError
from configs.worker import Worker

MAX_HUNG = 3  # threads left behind: each may hold the interpreter lock for good

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class _Job:
    """A batch for the thread; `results` grows by one for each item."""

    function: Callable[[Any], Any]
    items: Sequence[Any]
    done: asyncio.Event
    loop: asyncio.AbstractEventLoop
    results: list[Any] = field(default_factory=list)
    abandoned: bool = False


class EnvironmentThread:
    """Applies functions to batches of items.

    Example:
        for rollout, judgement in zip(batch, await thread.map(Rollout.judge, batch)):
            ...
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Prepare; the thread starts with the first batch.

        Args:
            timeout_s: An item that takes longer has failed.
        """
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._num_hung = 0

    async def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R | Exception]:
        """Return what `function` returned or raised, item by item.

        Raises:
            DeadlineError: Too many items have hung: the environment cannot be worked with.
        """
        results: list[R | Exception] = []
        async with self._one_at_a_time:
            while len(results) < len(items):
                results += await self._attempt(function, items[len(results) :])
        return results

    async def _attempt(self, function: Callable[[T], R], items: Sequence[T]) -> list[Any]:
        """Work through the items, or through those before and with the first that hangs."""
        job = _Job(function, items, asyncio.Event(), asyncio.get_running_loop())
        self._queue().put(job)
        seen = 0
        while not job.done.is_set():
            try:
                async with asyncio.timeout(self._timeout_s):
                    await job.done.wait()
            except TimeoutError:
                if len(job.results) > seen:
                    seen = len(job.results)
                    continue
                return self._abandon(job, seen)
        return job.results

    def _abandon(self, job: _Job, seen: int) -> list[Any]:
        job.abandoned = True
        self._jobs = None
        self._num_hung += 1
        error = DeadlineError(f"environment must answer within {self._timeout_s:g} s, got no end")
        if self._num_hung > MAX_HUNG:
            raise error
        return [*job.results[:seen], error]

    def _queue(self) -> queue.SimpleQueue[_Job]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # Foreign code can end it, by `sys.exit`; the item has then failed like one that hangs.
            Worker(partial(_work, self._jobs), name="environment").start()
        return self._jobs


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    """Serve one queue until a job of it was abandoned."""
    while True:
        job = jobs.get()
        for item in job.items:
            try:
                result = job.function(item)
            except Exception as error:  # noqa: BLE001 - foreign code; the caller judges
                result = error
            if job.abandoned:
                return
            job.results.append(result)
        job.loop.call_soon_threadsafe(job.done.set)
