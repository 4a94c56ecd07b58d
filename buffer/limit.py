"""Changing the memory limit of a running server, to see what a full one does."""

from __future__ import annotations

import redis

from buffer.client.address import connect, disconnect, without_password
from buffer.client.errors import explain


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
