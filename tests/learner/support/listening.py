"""Addresses on which a tree of processes accepts connections, and its open files, from /proc."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LISTEN = "0A"  # state of a socket in /proc/net/tcp
PROC = Path("/proc")
STANDARD = 3  # standard input, output and errors, which every process has open


def family(pid: int) -> set[int]:
    """List a process and all that descend from it."""
    members = {pid}
    parents = {int(p.name): _parent(p) for p in PROC.iterdir() if p.name.isdigit()}
    while grown := {child for child, parent in parents.items() if parent in members} - members:
        members |= grown
    return members


def listening(pid: int) -> set[str]:
    """List the addresses on which a process or a descendant listens."""
    return {address for address, _ in listening_at(pid)}


def listening_at(pid: int) -> set[tuple[str, int]]:
    """List them with their ports."""
    sockets = {inode for member in family(pid) for inode in _sockets(member)}
    return {
        place
        for table in ("tcp", "tcp6")
        for place, inode in _listeners(PROC / str(pid) / "net" / table)
        if inode in sockets
    }


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
        return 0


def _sockets(pid: int) -> set[str]:
    inodes = set()
    for target in open_files(pid):
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def open_files(pid: int) -> list[str]:
    """List what a process has open, as /proc names it; nothing once it has ended."""
    found = []
    with suppress(OSError):  # it has just ended
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):  # it has just been closed
                found.append(str(descriptor.readlink()))
    return found


@contextmanager
def without_files() -> Iterator[None]:
    """Let this process open no file, as when connections have taken all that it may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _listeners(table: Path) -> list[tuple[tuple[str, int], str]]:
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [(_place(row[1]), row[9]) for row in rows if row[3] == LISTEN]


def _place(written: str) -> tuple[str, int]:
    """Decode an address of 32-bit words in host order, and a port."""
    hexadecimal, _, port = written.partition(":")
    words = [hexadecimal[i : i + 8] for i in range(0, len(hexadecimal), 8)]
    packed = b"".join(int(word, 16).to_bytes(4, "little") for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)
