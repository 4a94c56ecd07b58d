"""Child processes: their end with their parent.

Imports no more than Python has loaded anyway: a program in the sandbox starts with it.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9  # `signal` takes as long to import as everything else here


def die_with_parent(number: int = SIGKILL, *, parent: int | None = None) -> None:
    """Ask for a signal when the thread that started this process ends (Linux; elsewhere nothing).

    Args:
        number: The signal.
        parent: The process that started this one, if it says so: one that ended before this call
            sends no signal, and this process ends at once.

    Raises:
        OSError: The kernel refuses it.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (number, 0, 0, 0))):
        code = ctypes.get_errno()
        raise OSError(code, f"a signal at the parent's end: {os.strerror(code)}")
    if parent is not None and os.getppid() != parent:
        sys.exit("the parent of this process has ended")
