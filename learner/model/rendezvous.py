"""Rendezvous of ranks: variables of a launcher, and listeners that others find no longer."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# --------------------------------------------------------------------------------------------------
# Environment variables by which a launcher lets a rank find the others.

RENDEZVOUS_FILE = "NYALA_RENDEZVOUS_FILE"
"""Path of the file through which the ranks of one machine meet."""
RENDEZVOUS_ADDRESS = "NYALA_RENDEZVOUS_ADDRESS"
"""`host:port` of the store through which the ranks of several machines meet."""
RENDEZVOUS_SOCKET = "NYALA_RENDEZVOUS_SOCKET"
"""Of rank 0 alone: the descriptor of that store's socket, which listens already."""
LAUNCHER_SET = "NYALA_LAUNCHER_SET"
"""Names of the variables that the launcher chose for its ranks, with commas between them."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Network interfaces of gloo and NCCL."""


def interfaces(ours: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for ranks that meet on this interface; what a person has set stays."""
    chosen = [name for name in INTERFACES if name not in environment]
    return dict.fromkeys(chosen, ours) | {LAUNCHER_SET: ",".join(chosen)}


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a process inherits that talks to others than the ranks."""
    chosen = environment.get(LAUNCHER_SET, "").split(",")
    return {name: text for name, text in environment.items() if name not in (*chosen, LAUNCHER_SET)}


# --------------------------------------------------------------------------------------------------
# Listeners of gloo, closed to all who come after the ranks have met.
#
# gloo listens as long as its group lives, asks for no key, and keeps each connection for ever: by a
# thousand of them whoever reaches the port would take all open files of a rank, and abort it. What
# is closed here answers no packet that opens a connection, as if nothing listened; connections that
# are there stay.

DESCRIPTORS = Path("/proc/self/fd")
SO_ATTACH_FILTER = 26  # of Linux; `socket` does not name it
KEEP_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # a filter of one instruction: return 0 bytes


@contextmanager
def closed_to_strangers() -> Iterator[None]:
    """Let nobody connect any more to what has begun to listen within the block.

    The store of ranks that others have started, at MASTER_PORT, stays open to them.
    """
    before = {inode for inode, _ in _listeners()}
    yield
    program = ctypes.create_string_buffer(KEEP_NOTHING)
    options = struct.pack("@HP", 1, ctypes.addressof(program))
    for inode, listener in _listeners():
        port = str(listener.getsockname()[1])
        if inode not in before and port != os.environ.get("MASTER_PORT"):
            with suppress(OSError):  # a sandbox without such filters; the limit of files is raised
                listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, options)


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Yield the inode of each TCP listener of this process, and the listener until the next one."""
    for number in map(int, [path.name for path in DESCRIPTORS.glob("*")]):
        with suppress(OSError):  # it has been closed, or is no socket
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                is_tcp = found.family in {socket.AF_INET, socket.AF_INET6}
                if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield os.fstat(found.fileno()).st_ino, found
