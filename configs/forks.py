"""Forks of a process that has imported libraries: whether one is safe, and what it lets go of.

Asked before an actor forks vLLM's engine, and by the process that `nyala up` forks roles from.

Only the thread that forks exists in the fork. A lock that another thread held stays locked there,
and the work of that thread is not done. A fork that does not run a new program also keeps every
open file of its parent: a connection that the parent closes would stay open for the other side, and
a file lock would stay held.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from .child import die_with_parent

DRIVER = "libcuda.so.1"
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: `cuInit` was never called
ASLEEP_S = 2.0
"""Time for the threads that a library has just started to fall asleep."""
TASKS = Path("/proc/self/task")
FILES = Path("/proc/self/fd")


def has_met_cuda() -> bool:
    """Whether something in this process has initialised CUDA's driver.

    A fork of such a process cannot use CUDA.
    """
    try:
        driver = ctypes.CDLL(DRIVER, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # nothing has loaded it
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != NOT_INITIALIZED


class Thread(NamedTuple):
    """A thread of this process beside its main one."""

    number: int
    name: str
    """Name that Python gave it; else that of its task (`comm`, proc(5)), often of the program."""
    is_of_python: bool
    """Whether Python code started it."""
    state: str
    """A letter of proc(5); S = asleep."""

    def __str__(self) -> str:
        name = f"Python's {self.name!r}" if self.is_of_python else self.name
        return f"{name} ({self.state})"


def other_threads() -> list[Thread]:
    """List the threads of this process beside its main one."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    threads = []
    for task in TASKS.iterdir():
        number = int(task.name)
        if number == os.getpid():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            comm, _, rest = (task / "stat").read_text(encoding="utf-8").rpartition(")")
            name = names.get(number) or comm.partition("(")[2]
            threads.append(Thread(number, name, number in names, rest.split()[0]))
    return threads


def fault_of_forks() -> str:
    """Return why this process must not be forked; empty = it may be.

    Waits up to `ASLEEP_S` for threads to fall asleep.

    Any thread that Python started forbids a fork. Threads that a library starts as it is imported
    do not forbid one once they sleep: they are pools that wait for work (OpenBLAS, jemalloc), hold
    no lock then, and are ended before a fork or started again after it by handlers of
    `pthread_atfork`. The pool of OpenMP is an exception, but no import starts it.
    """
    if has_met_cuda():
        return "CUDA is initialised"
    until = time.monotonic() + ASLEEP_S
    while True:
        threads = other_threads()
        if not any(thread.is_of_python or thread.state != "S" for thread in threads):
            return ""
        if time.monotonic() > until:
            return f"there are other threads: {', '.join(sorted(map(str, threads)))}"
        time.sleep(ASLEEP_S / 100)


# --------------------------------------------------------------------------------------------------
# What a fork closes.

_forker = (0, 0)
"""The thread whose forks close what others wait for, and its process; zeros = none."""
_is_registered = False


@contextmanager
def forks_let_go() -> Iterator[None]:
    """Let forks of this thread in the block end with it, and close files that others wait for.

    Such a fork gets SIGKILL when this thread ends. Its sockets, pipes to others and writable files
    (`files_of_others`) lead to /dev/null.
    """
    global _forker, _is_registered  # noqa: PLW0603 - `os.register_at_fork` cannot be undone
    if not _is_registered:
        os.register_at_fork(after_in_child=_let_go)
        _is_registered = True
    _forker = threading.get_ident(), os.getpid()
    try:
        yield
    finally:
        _forker = 0, 0


def _let_go() -> None:
    global _forker  # noqa: PLW0603 - a fork of this one keeps what it has
    thread, parent = _forker
    if thread != threading.get_ident():
        return
    _forker = 0, 0
    try:
        die_with_parent(parent=parent)
    except SystemExit:  # it has ended; what a hook of a fork raises goes nowhere
        os._exit(1)
    # The fork shares this file with the parent's event loop: its signals would reach the parent.
    signal.set_wakeup_fd(-1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in files_of_others():
        os.dup2(nowhere, number, inheritable=False)  # a copied object may still close it
    os.close(nowhere)


def files_of_others() -> list[int]:
    """List sockets, pipes whose other end is elsewhere, and writable files; standard files not."""
    targets = {}
    for path in FILES.iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            targets[int(path.name)] = str(path.readlink())
    ends = Counter(targets.values())
    return [
        number
        for number, place in targets.items()
        if number > 2
        and (
            place.startswith("socket:")
            or (place.startswith("pipe:") and ends[place] == 1)
            or _is_written(number)
        )
    ]


def _is_written(number: int) -> bool:
    lines = Path(f"/proc/self/fdinfo/{number}").read_text(encoding="ascii").splitlines()
    flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
    return S_ISREG(os.fstat(number).st_mode) and flags & os.O_ACCMODE != os.O_RDONLY
