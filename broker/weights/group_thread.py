"""A thread that owns one process group: all that blocks about it happens there, and nowhere else.

A collective with a dead or stopped peer returns only at its own timeout, and so may the destruction
of its group. So nobody joins this thread: it is left, and ends by itself when what it waits for
times out. Knows nothing of torch; shared by sender and receiver.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar


class Group(Protocol):
    """A process group that is open."""

    def close(self) -> None:
        """Leave it; peers that wait for us get an error."""
        ...


G = TypeVar("G", bound=Group)
T = TypeVar("T")


class GroupThread(Generic[G]):
    """Builds a group at the first call, runs calls in order, and closes the group after `leave`.

    Args:
        build: Joins the group; runs in the thread.
        name: Name of the thread.
        unused: Frees what `build` would have used, if it was never needed.
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
        # A daemon, so that a stuck collective cannot keep a process from ending.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[G], T]) -> asyncio.Future[T]:
        """Run a function of the group in the thread. Whoever awaits it brings the deadline."""
        future: Future[T] = Future()
        self._calls.put((function, future))
        return asyncio.wrap_future(future)

    def leave(self) -> None:
        """End the thread after what it is doing now; there must be no further call."""
        self._calls.put(None)

    def _run(self) -> None:
        group: G | None = None
        while (call := self._calls.get()) is not None:
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                group = group or self._build()
                result = function(group)
            except Exception as error:  # noqa: BLE001 - raised where the future is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, function, future  # they hold gigabytes of mapped weights
        if group is not None:
            group.close()
        else:
            self._unused()
