"""A thread that owns one process group, and makes all its blocking calls.

A collective with a dead or stopped peer returns only at its own timeout, or when its group is
aborted, and so may the destruction of the group. So this thread is never joined: it is left, and
ends when the call under way does. Free of torch; shared by sender and receiver.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from configs.worker import Worker


class Group(Protocol):
    """A process group that is open."""

    def abort(self) -> None:
        """End the call under way, from another thread, where the backend can."""
        ...

    def close(self) -> None:
        """Leave it; peers that wait for this one get an error."""
        ...


G = TypeVar("G", bound=Group)
T = TypeVar("T")


class GroupThread(Generic[G]):
    """Builds a group at the first call, runs calls in order, and closes the group after `leave`.

    Args:
        build: Joins the group, in the thread.
        name: Name of the thread.
        unused: Frees the resources of `build`, if it was never called.
    """

    def __init__(
        self,
        build: Callable[[], G],
        *,
        name: str,
        unused: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._unused = unused
        self._calls: queue.SimpleQueue[tuple[Callable[[G], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._name = name
        self._busy: G | None = None
        """The group, while a call is under way."""
        self._worker = Worker(self._run, name=name).start()

    def call(self, function: Callable[[G], T]) -> asyncio.Future[T]:
        """Run a function of the group in the thread. The caller sets the deadline."""
        return asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[G], T]) -> Future[T]:
        """As `call`, for a caller without an event loop."""
        self._worker.check()
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future

    def leave(self) -> None:
        """End the thread after the call under way, or abort that; there must be no further call."""
        self._calls.put(None)
        busy = self._busy
        if busy is not None:  # an abort may take its time too
            Worker(busy.abort, name=f"{self._name}-abort").start()

    def _run(self) -> None:
        group: G | None = None
        while (call := self._calls.get()) is not None:
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                group = self._busy = group or self._build()
                result = function(group)
            except Exception as error:  # noqa: BLE001 - raised where the future is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                self._busy = None
            del call, function, future  # they hold gigabytes of mapped weights
        if group is not None:
            group.close()
        else:
            self._unused()
