"""Child processes: their end with their parent, and frames on the pipes between both.

Imports no more than Python has loaded anyway: a program in the sandbox starts with it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable

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


LENGTH = struct.Struct(">I")
"""Length of a frame, which precedes it."""


class MalformedFrame(ValueError):
    """Received bytes are not a valid frame."""


def as_frame(body: bytes) -> bytes:
    """Return a body with its length before it."""
    return LENGTH.pack(len(body)) + body


def length_of(header: bytes, *, max_bytes: int) -> int:
    """Return the length of the body that follows.

    Raises:
        MalformedFrame: It is longer than `max_bytes`, so these bytes are no header.
    """
    length: int = LENGTH.unpack(header)[0]
    if length > max_bytes:
        raise MalformedFrame(f"a frame of {length:,} bytes, which must be at most {max_bytes:,}")
    return length


def read_frame(read: Callable[[int], bytes], *, max_bytes: int = 2**32 - 1) -> bytes | None:
    """Return the body of the next frame; None if the other side ended, even within a frame.

    Args:
        read: Reads as many bytes as it is asked for, or fewer at the end.
        max_bytes: The longest body that the other side sends.

    Raises:
        MalformedFrame: The next bytes are no header of a frame of at most `max_bytes`.
    """
    header = read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    length = length_of(header, max_bytes=max_bytes)
    body = read(length)
    return body if len(body) == length else None
