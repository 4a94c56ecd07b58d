"""Check that this container listens on a port, or is connected to one: exit code 0 or 1.

`healthcheck.py listening 5757` for a server, `healthcheck.py connected 5757` for its client. Reads
the kernel's table of connections, so that a check never opens a connection that requires keys.
"""

from __future__ import annotations

import sys
from pathlib import Path

ESTABLISHED, LISTEN = "01", "0A"
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def is_healthy(what: str, port: int, tables: str) -> bool:
    """Look for a socket in the kernel's table.

    Args:
        what: `listening` on our `port`, or `connected` to a peer's.
        port: The port.
        tables: Text of /proc/net/tcp and tcp6; a line is number, local address, remote address,
            state.
    """
    column, state = {"listening": (1, LISTEN), "connected": (2, ESTABLISHED)}[what]
    rows = (line.split() for line in tables.splitlines())
    wanted = f":{port:04X}"
    return any(len(row) > 3 and row[column].endswith(wanted) and row[3] == state for row in rows)


if __name__ == "__main__":
    text = "\n".join(table.read_text(encoding="ascii") for table in TABLES if table.exists())
    sys.exit(not is_healthy(sys.argv[1], int(sys.argv[2]), text))
