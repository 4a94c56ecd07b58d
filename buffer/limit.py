"""Changing the memory limit of a running server, to see what a full one does."""

from __future__ import annotations

import redis

from .store import explain, without_password


def limit_memory(url: str, limit_bytes: int) -> int:
    """Set Redis' maxmemory; returns what it was before.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    with redis.Redis.from_url(url, socket_timeout=20.0, socket_connect_timeout=5.0) as client:
        try:
            before = int(client.config_get("maxmemory")["maxmemory"])
            client.config_set("maxmemory", limit_bytes)
        except redis.RedisError as error:
            raise explain(error, "limit", f"the server at {without_password(url)}") from error
    return before
