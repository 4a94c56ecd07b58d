"""Which TCP addresses a process listens on, as the kernel says."""

import contextlib
import socket
import struct
from pathlib import Path

LISTEN = "0A"


def addresses(pid: int) -> set[tuple[str, int]]:
    """Return (host, port) of every listening TCP socket of a process."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(link.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                found.add((_readable(host), int(port, 16)))
    return found


def _readable(host: str) -> str:
    words = [struct.pack("<I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
