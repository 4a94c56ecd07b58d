"""State of a Redis server: version, eviction, durability, memory, clock.

Asks INFO and TIME alone, which the access rules of a run's users allow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from .address import without_password
from .errors import asking
from .server_identity import Server, server_of_info

LEAST_VERSION = (6, 2)
"""Of Redis: the scripts use its commands."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far another clock is ahead of this process's, within an uncertainty; seconds."""

    ahead_s: float
    within_s: float
    """Half of the round trip: the reading was made at some moment of it."""

    @property
    def least_s(self) -> float:
        """What the clocks differ by at least."""
        return max(0.0, abs(self.ahead_s) - self.within_s)


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server at one moment."""

    server: Server | None
    """None where it names no version."""
    policy: str
    """`maxmemory-policy`."""
    has_aof: bool
    is_writing: bool
    """Its last writes to disk worked."""
    used_bytes: int
    limit_bytes: int
    """`maxmemory`; 0 = none."""
    clock: ClockOffset


def read_server_state(url: str, *, clock: Callable[[], float] = time.time) -> ServerState:
    """Ask a server; changes nothing.

    Args:
        url: Of Redis.
        clock: Of this machine, Unix seconds.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    with asking(url, "INFO", f"the server at {without_password(url)}") as client:
        parts = [client.info(section) for section in ("server", "memory", "persistence")]
        found: dict[str, Any] = {name: value for part in parts for name, value in part.items()}
        offset = _offset(client, clock)
    statuses = ("aof_last_write_status", "aof_last_bgrewrite_status")
    return ServerState(
        server=server_of_info({name: str(value) for name, value in found.items()}),
        policy=str(found.get("maxmemory_policy", "unknown")),
        has_aof=bool(found.get("aof_enabled")),
        is_writing=all(found.get(name, "ok") == "ok" for name in statuses),
        used_bytes=int(found.get("used_memory", 0)),
        limit_bytes=int(found.get("maxmemory", 0)),
        clock=offset,
    )


def _offset(client: redis.Redis, clock: Callable[[], float]) -> ClockOffset:
    """Compare the clocks by the quickest of three readings."""
    readings = []
    for _ in range(3):
        before = clock()
        seconds, microseconds = client.time()
        after = clock()
        ahead_s = seconds + microseconds / 1e6 - (before + after) / 2
        readings.append(ClockOffset(ahead_s, max(0.0, after - before) / 2))
    return min(readings, key=lambda each: each.within_s)
