"""Administration of a whole Redis server: its runs, deletion of a run, another port, maxmemory.

Used by `nyala up --fresh` and lists of runs; `nyala chaos` opens ports and lowers maxmemory.
"""

from __future__ import annotations

from buffer.client.address import without_password
from buffer.client.errors import asking
from buffer.operations.keys import run_prefix

KEYS_PER_CALL = 1000  # about a millisecond of the server's time


def forget_run(url: str, run: str) -> int:
    """Delete every key of a run in Redis; return their number.

    Records in an object store stay.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    place = f"run {run!r} at {without_password(url)}"
    with asking(url, "forget", place) as client:
        keys = client.scan_iter(match=f"{run_prefix(run)}:*", count=KEYS_PER_CALL)
        return sum(int(client.unlink(key)) for key in keys)


def list_runs(url: str) -> list[str]:
    """Return the names of all runs of a server.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    with asking(url, "list runs", without_password(url)) as client:
        keys = list(client.scan_iter(match=f"{run_prefix('*')}:meta", count=KEYS_PER_CALL))
    before, after = f"{run_prefix('*')}:meta".split("*")
    names = {key.decode(errors="replace") for key in keys}  # SCAN may name a key twice
    return sorted(name.removeprefix(before).removesuffix(after) for name in names)


def open_port(url: str, port: int) -> None:
    """Make a server that listens only on a Unix socket listen on a port too, until it ends.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    with asking(url, "open", f"port {port} of {without_password(url)}") as client:
        client.config_set("port", port)


def limit_memory(url: str, limit_bytes: int) -> int:
    """Set Redis' maxmemory until the server ends; return the value before, in bytes.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    with asking(url, "limit", f"the server at {without_password(url)}") as client:
        before = int(client.config_get("maxmemory")["maxmemory"] or 0)
        client.config_set("maxmemory", limit_bytes)
    return before
