"""Addresses on which a tree of processes accepts connections, from Linux' /proc."""

from __future__ import annotations

import socket
from pathlib import Path

LISTEN = "0A"  # state of a socket in /proc/net/tcp
PROC = Path("/proc")


def family(pid: int) -> set[int]:
    """List a process and all that descend from it."""
    members = {pid}
    parents = {int(p.name): _parent(p) for p in PROC.iterdir() if p.name.isdigit()}
    while grown := {child for child, parent in parents.items() if parent in members} - members:
        members |= grown
    return members


def listening(pid: int) -> set[str]:
    """List the addresses on which a process or a descendant listens."""
    sockets = {inode for member in family(pid) for inode in _sockets(member)}
    return {
        address
        for table in ("tcp", "tcp6")
        for address, inode in _listeners(PROC / str(pid) / "net" / table)
        if inode in sockets
    }


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
        return 0


def _sockets(pid: int) -> set[str]:
    inodes = set()
    for descriptor in (PROC / str(pid) / "fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # it has just been closed
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def _listeners(table: Path) -> list[tuple[str, str]]:
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [(_address(row[1].partition(":")[0]), row[9]) for row in rows if row[3] == LISTEN]


def _address(hexadecimal: str) -> str:
    """Decode an address of 32-bit words in host order."""
    words = [hexadecimal[i : i + 8] for i in range(0, len(hexadecimal), 8)]
    packed = b"".join(int(word, 16).to_bytes(4, "little") for word in words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
