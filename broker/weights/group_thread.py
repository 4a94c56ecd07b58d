"""A thread that owns one process group, and listeners of groups closed to strangers.

The thread makes all blocking calls of its group. A collective with a dead or stopped peer returns
only at its own timeout, or when its group is aborted; so may the destruction of the group.
Therefore the thread is never joined: it is left behind, and ends with the call under way.

Free of torch; shared by sender and receiver, and by the ranks of the learner.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import queue
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from configs.worker import Worker

# --------------------------------------------------------------------------------------------------
# Listeners of gloo, closed to new connections after the members have met.
#
# gloo listens as long as its group lives, asks for no key, and keeps each connection for ever. So a
# stranger with a thousand connections would take all open files of a member, and abort it. A
# listener that is closed here ignores packets that open a connection; existing connections stay.

DESCRIPTORS = Path("/proc/self/fd")
SO_ATTACH_FILTER = 26  # of Linux; `socket` does not name it
KEEP_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # a filter of one instruction: return 0 bytes


@contextmanager
def closed_to_strangers() -> Iterator[None]:
    """Close the listeners that gloo opens within the block to further connections."""
    before = {inode for inode, _ in _listeners_of_gloo()}
    yield
    for inode, listener in _listeners_of_gloo():
        if inode not in before:
            answer_no_more(listener)


def answer_no_more(listener: socket.socket) -> None:
    """Close a listener to further connections, even if other processes have it open."""
    program = ctypes.create_string_buffer(KEEP_NOTHING)
    options = struct.pack("@HP", 1, ctypes.addressof(program))
    with suppress(OSError):  # a sandbox without such filters; the limit of files is raised
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, options)


def _listeners_of_gloo() -> Iterator[tuple[int, socket.socket]]:
    """Yield each listener with its inode; a listener is closed when the next is asked for.

    Only gloo's TCP listeners are inherited by programs that the process executes.
    """
    for number in map(int, [path.name for path in DESCRIPTORS.glob("*")]):
        with suppress(OSError):  # it has been closed, or is no socket
            is_ours = fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            if is_ours or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as copy:
                is_tcp = copy.family in {socket.AF_INET, socket.AF_INET6}
                if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield os.fstat(copy.fileno()).st_ino, copy


# --------------------------------------------------------------------------------------------------
# A thread that owns one process group.


class Group(Protocol):
    """A process group that is open."""

    def abort(self) -> None:
        """End the call under way, from another thread, if the backend can."""
        ...

    def close(self) -> None:
        """Leave the group; peers that wait for this member get an error."""
        ...


G = TypeVar("G", bound=Group)
T = TypeVar("T")


class GroupThread(Generic[G]):
    """Builds a group at the first call, runs calls in order, and closes it after `close_group`.

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
        """Run a function of the group in the thread, after those before it.

        The future has its result, or the error of `build` or of the function. The caller sets the
        deadline.
        """
        return asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[G], T]) -> Future[T]:
        """Do the same as `call`, for a caller without an event loop."""
        self._worker.raise_if_failed()
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future

    def close_group(self) -> None:
        """Ask the thread to end after the call under way, which is aborted; no call may follow.

        Returns at once. Calls that wait are made first, and the group is closed after them.
        """
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
