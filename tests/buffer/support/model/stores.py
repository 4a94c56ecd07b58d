"""Stores that a history plays on: Redis in memory, and a real server; the history sets the clock.

In memory the scripts run in Lua 5.1 in this process, which makes thousands of calls a second; the
real server shows that the one in memory answers alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol, TypeVar

import redis

from buffer.client.scripts import LoadScript, Script, make_script
from buffer.operations.keys import run_prefix
from buffer.operations.operation import Fetch, Operation, Reply, ScriptCall
from buffer.store import incoming
from tests.simulation.lua import Scripts
from tests.simulation.memory_redis import MemoryRedis

T = TypeVar("T")

PREFIX = run_prefix("modelled")
CLOCK = "clock"


class Playground(Protocol):
    """A store whose clock stands still until it is set."""

    run_id: str

    def run(self, operation: Operation[T]) -> T:
        """Carry an operation out; a refusal of the script is a redis.ResponseError."""

    def set_clock(self, now_us: int) -> None:
        """Set the time in microseconds."""

    def dump(self) -> Mapping[bytes, Any]:
        """All that it holds."""

    def expiring(self) -> set[bytes]:
        """Keys that go by themselves after a while."""

    def save(self) -> Any:
        """All that it holds, to restore later."""

    def restore(self, saved: Any) -> None:
        """Forget what came since."""


class _Played:
    """The steps of an operation, one after the other."""

    def run(self, operation: Operation[T]) -> T:
        return operation.carry_out(
            lambda call: self.fetch(call) if isinstance(call, Fetch) else self.call(call)
        )

    def call(self, call: ScriptCall) -> Reply:
        raise NotImplementedError

    def fetch(self, fetch: Fetch) -> Reply:
        raise NotImplementedError


class InMemory(_Played):
    """Redis in memory."""

    def __init__(self, scripts: LoadScript) -> None:
        self._now_s = 0.0
        self._load = cache(scripts)
        self._database = MemoryRedis(self._read_clock)
        self._lua = Scripts(self._database)
        self.run_id = self._database.run_id

    def _read_clock(self) -> float:
        return self._now_s

    def call(self, call: ScriptCall) -> Reply:
        for place, record in incoming(PREFIX, call.records).items():
            self._database.execute(b"SET", place.encode(), record)
        return self._lua.run(self._load(call.script), PREFIX, call.arguments)

    def fetch(self, fetch: Fetch) -> Reply:
        return self._database.execute(b"MGET", *(f"{PREFIX}{key}".encode() for key in fetch.keys))

    def set_clock(self, now_us: int) -> None:
        self._now_s = now_us / 1e6

    def dump(self) -> Mapping[bytes, Any]:
        return self._database.dump()

    def expiring(self) -> set[bytes]:
        return set(self._database.expiries)

    def save(self) -> MemoryRedis:
        return self._database.copy()

    def restore(self, saved: MemoryRedis) -> None:
        self._database = self._lua.database = saved.copy()


class OnServer(_Played):
    """A real server; the scripts read the time from a key."""

    def __init__(self, url: str, scripts: LoadScript) -> None:
        self._client = redis.Redis.from_url(url)
        self._client.flushdb()
        self._load = cache(lambda name: _reading_key(scripts(name)))
        self.run_id = str(self._client.info("server")["run_id"])

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    def call(self, call: ScriptCall) -> Reply:
        for place, record in incoming(PREFIX, call.records).items():
            self._client.set(place, record)
        return self._client.eval(self._load(call.script).source, 1, PREFIX, *call.arguments)

    def fetch(self, fetch: Fetch) -> Reply:
        return self._client.mget([f"{PREFIX}{key}" for key in fetch.keys])

    def set_clock(self, now_us: int) -> None:
        self._client.hset(CLOCK, mapping={"s": now_us // 10**6, "us": now_us % 10**6})

    def dump(self) -> Mapping[bytes, Any]:
        keys = [key for key in self._client.keys(f"{PREFIX}:*") if isinstance(key, bytes)]
        return {key: self._read(key) for key in keys}

    def expiring(self) -> set[bytes]:
        keys = self._client.keys(f"{PREFIX}:*")
        return {key for key in keys if isinstance(key, bytes) and self._client.ttl(key) >= 0}

    def save(self) -> dict[bytes, tuple[int, bytes]]:
        keys = [key for key in self._client.keys(f"{PREFIX}:*") if isinstance(key, bytes)]
        return {
            key: (max(0, self._client.pttl(key)), self._client.dump(key) or b"") for key in keys
        }

    def restore(self, saved: dict[bytes, tuple[int, bytes]]) -> None:
        for key in self._client.keys(f"{PREFIX}:*"):
            self._client.unlink(key)
        for key, (ttl_ms, payload) in saved.items():
            self._client.restore(key, ttl_ms, payload)

    def _read(self, key: bytes) -> Any:
        kind = self._client.type(key)
        if kind == b"zset":
            pairs: Any = self._client.zrange(key, 0, -1, withscores=True)
            return [(score, member) for member, score in pairs]
        if kind == b"set":
            return sorted(self._client.smembers(key))
        if kind == b"hash":
            return self._client.hgetall(key)
        return self._client.lrange(key, 0, -1) if kind == b"list" else self._client.get(key)


class FullServer(OnServer):
    """A real server that is full at every call but of those that are spared.

    A script may end what it began: its first write decides.
    """

    def __init__(self, url: str, scripts: LoadScript, *, spared: frozenset[str]) -> None:
        super().__init__(url, scripts)
        self._spared = spared
        self._limit = int(self._client.config_get("maxmemory")["maxmemory"] or 0)
        self.called: set[str] = set()
        """Scripts that were called while it was full."""

    def call(self, call: ScriptCall) -> Reply:
        if call.script in self._spared:
            return super().call(call)
        self.called.add(call.script)
        self._client.config_set("maxmemory", 1)
        try:
            return super().call(call)
        finally:
            self._client.config_set("maxmemory", self._limit)


def _reading_key(script: Script) -> Script:
    clock = f"call('HMGET', '{CLOCK}', 's', 'us')"
    return make_script(script.source.replace("call('TIME')", clock))
