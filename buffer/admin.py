"""A whole server: its runs, their keys (`nyala up --fresh`), maxmemory (`nyala chaos`)."""

from __future__ import annotations

import redis

from buffer.client.address import connect, disconnect, without_password
from buffer.client.errors import explain
from buffer.operations.keys import run_prefix

KEYS_PER_CALL = 1000  # about a millisecond of the server's time


def forget_run(url: str, run: str) -> int:
    """Delete every key of a run; returns how many there were.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    client, count = connect(url), 0
    try:
        for key in client.scan_iter(match=f"{run_prefix(run)}:*", count=KEYS_PER_CALL):
            count += int(client.unlink(key))
    except redis.RedisError as error:
        raise explain(error, "forget", f"run {run!r} at {without_password(url)}") from error
    finally:
        disconnect(client)
    return count


def list_runs(url: str) -> list[str]:
    """Return the names of all runs of a server.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    client = connect(url)
    try:
        keys = list(client.scan_iter(match=f"{run_prefix('*')}:meta", count=KEYS_PER_CALL))
    except redis.RedisError as error:
        raise explain(error, "list runs", without_password(url)) from error
    finally:
        disconnect(client)
    before, after = f"{run_prefix('*')}:meta".split("*")
    names = {key.decode(errors="replace") for key in keys}  # SCAN may name a key twice
    return sorted(name.removeprefix(before).removesuffix(after) for name in names)


def open_port(url: str, port: int) -> None:
    """Let a server that listens on a socket alone listen on a port, too, until it ends.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    client = connect(url)
    try:
        client.config_set("port", port)
    except redis.RedisError as error:
        raise explain(error, "open", f"port {port} of {without_password(url)}") from error
    finally:
        disconnect(client)


def limit_memory(url: str, limit_bytes: int) -> int:
    """Set Redis' maxmemory; returns what it was before.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    client = connect(url)
    try:
        before = int(client.config_get("maxmemory")["maxmemory"] or 0)
        client.config_set("maxmemory", limit_bytes)
    except redis.RedisError as error:
        raise explain(error, "limit", f"the server at {without_password(url)}") from error
    finally:
        disconnect(client)
    return before
