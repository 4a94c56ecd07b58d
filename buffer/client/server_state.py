"""State of a Redis server: version, eviction, durability, memory, clock.

Read by `nyala doctor` and before a start. Uses only INFO and TIME, which the access rules of a
run's users allow.
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
"""Oldest version of Redis that has the commands of the scripts."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Offset of another clock from this process's, with its uncertainty; seconds."""

    ahead_s: float
    within_s: float
    """Uncertainty: half of the round trip of the reading."""

    @property
    def least_s(self) -> float:
        """Least difference of the clocks."""
        return max(0.0, abs(self.ahead_s) - self.within_s)


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of one server at one moment."""

    server: Server | None
    """Program and version; None if the server names no version."""
    policy: str
    """`maxmemory-policy`."""
    has_aof: bool
    is_writing: bool
    """Whether its last writes to disk worked."""
    used_bytes: int
    limit_bytes: int
    """`maxmemory`; 0 = none."""
    clock: ClockOffset


def read_server_state(url: str, *, clock: Callable[[], float] = time.time) -> ServerState:
    """Read the state of a server without a change.

    Args:
        url: URL of Redis.
        clock: Clock of this machine, Unix seconds.

    Raises:
        StoreError: Redis refused or cannot be reached.
    """
    with asking(url, "INFO", f"the server at {without_password(url)}") as client:
        parts = [client.info(section) for section in ("server", "memory", "persistence")]
        info: dict[str, Any] = {name: value for part in parts for name, value in part.items()}
        offset = _offset(client, clock)
    statuses = ("aof_last_write_status", "aof_last_bgrewrite_status")
    return ServerState(
        server=server_of_info({name: str(value) for name, value in info.items()}),
        policy=str(info.get("maxmemory_policy", "unknown")),
        has_aof=bool(info.get("aof_enabled")),
        is_writing=all(info.get(name, "ok") == "ok" for name in statuses),
        used_bytes=int(info.get("used_memory", 0)),
        limit_bytes=int(info.get("maxmemory", 0)),
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
    return min(readings, key=lambda reading: reading.within_s)
