"""System calls that Python has no function for, on Linux and x86_64."""

from __future__ import annotations

import ctypes
import os
import struct

MOUNT_SETATTR = 442
PIVOT_ROOT = 155
CAPSET = 126

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

_LIBC = ctypes.CDLL(None, use_errno=True)
_CAPABILITIES_V3 = 0x20080522


def system_call(what: str, number: int, *arguments: int | bytes | None) -> int:
    """Make a system call.

    Raises:
        OSError: It failed; its text begins with `what`.
    """
    return _checked(what, _LIBC.syscall(ctypes.c_long(number), *map(_whole, arguments)))


def prctl(what: str, option: int, *arguments: int) -> None:
    """Set an attribute of this process.

    Raises:
        OSError: The kernel refuses it; its text begins with `what`.
    """
    padded = (*arguments, 0, 0, 0, 0)[:4]
    _checked(what, _LIBC.prctl(option, *map(ctypes.c_ulong, padded)))


def unshare(flags: int) -> None:
    """Leave namespaces.

    Raises:
        OSError: The kernel refuses it.
    """
    _checked("new namespaces", _LIBC.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or a folder a second time.

    Raises:
        OSError: The kernel refuses it.
    """
    texts = [text.encode() for text in (source, target, kind)]
    made = _LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode())
    _checked(f"mount of {source}", made)


def unmount(target: str, flags: int) -> None:
    """Take a mounted file system away.

    Raises:
        OSError: The kernel refuses it.
    """
    _checked(f"unmount of {target}", _LIBC.umount2(target.encode(), flags))


def drop_capabilities() -> None:
    """Give up all rights that a process may have beyond those of its user."""
    system_call("dropping capabilities", CAPSET, struct.pack("Ii", _CAPABILITIES_V3, 0), bytes(24))


def install_filter(instructions: bytes) -> None:
    """Have every later system call of this process judged by a BPF program."""
    held = ctypes.create_string_buffer(instructions)
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(held))
    )
    prctl("a seccomp filter", PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _whole(argument: int | bytes | None) -> ctypes.c_long | bytes | None:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
