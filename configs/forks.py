"""Forks of a process that has imported libraries: whether one is safe, and what it lets go of.

A fork has the one thread that forked. A lock that another held stays taken in it, and what that
thread did nobody does. And a fork that goes on without a new program has every file of its parent:
no connection that the parent closes would be closed for the other side, nor a lock be free.
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

from .child import die_with_parent

DRIVER = "libcuda.so.1"
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: `cuInit` was never called
ASLEEP_S = 2.0
"""For threads that a library has just started to come to rest."""
TASKS = Path("/proc/self/task")
FILES = Path("/proc/self/fd")


def has_met_cuda() -> bool:
    """Whether something in this process has asked CUDA's driver for more than its version.

    No fork of it could use CUDA.
    """
    try:
        driver = ctypes.CDLL(DRIVER, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # nothing has loaded it
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != NOT_INITIALIZED


def other_threads() -> dict[str, str]:
    """Return the threads of this process beside its main one: number -> name and state.

    One of Python's has its name there, any other that of its task (`comm`, proc(5)): often that of
    the program, sometimes that of the library which started it.
    """
    named = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found = {}
    for task in TASKS.iterdir():
        if task.name == str(os.getpid()):
            continue
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            comm, _, rest = (task / "stat").read_text(encoding="utf-8").rpartition(")")
            name = named.get(task.name)
            name = f"Python's {name!r}" if name else comm.partition("(")[2]
            found[task.name] = f"{name} ({rest.split()[0]})"
    return found


def fault_of_forks() -> str:
    """Say why this process must not be forked; empty = it may.

    Threads of Python's own forbid it. Those that a library starts as it is imported do not, once
    they sleep: they are pools that wait for work (OpenBLAS, jemalloc), hold no lock then, and are
    ended before a fork or made anew after it by the handlers of `pthread_atfork`. The exception is
    OpenMP, whose pool no import starts.
    """
    if has_met_cuda():
        return "CUDA has been met"
    until = time.monotonic() + ASLEEP_S
    while True:
        threads = sorted(other_threads().values())
        if not any(each.startswith("Python's") or not each.endswith("(S)") for each in threads):
            return ""
        if time.monotonic() > until:
            return f"there are other threads: {', '.join(threads)}"
        time.sleep(ASLEEP_S / 100)


# --------------------------------------------------------------------------------------------------
# What a fork lets go of.

_forker = (0, 0)
"""The thread whose forks let go, and its process."""
_is_registered = False


@contextmanager
def forks_let_go() -> Iterator[None]:
    """Have forks of this thread end with it, and keep nothing that others wait for."""
    global _forker, _is_registered  # noqa: PLW0603 - `os.register_at_fork` knows no way back
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
    # The parent's event loop has its own end of this: a signal to the fork would reach the parent.
    signal.set_wakeup_fd(-1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in files_of_others():
        os.dup2(nowhere, number, inheritable=False)  # an object of the parent's may close it yet
    os.close(nowhere)


def files_of_others() -> list[int]:
    """List sockets, pipes whose other end is elsewhere, and files to be written; not 0 to 2."""
    found = {}
    for path in FILES.iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found[int(path.name)] = str(path.readlink())
    ends = Counter(found.values())
    return [
        number
        for number, place in found.items()
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
