"""The store of a simulated fleet: the real Lua over a Redis in memory, at a simulated time.

A call of a real server would be two changes of processes, thirty times the work itself.
`tests/simulation/test_memory_redis.py` holds the Redis in memory against a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from buffer.client.scripts import load_script
from buffer.operations.keys import run_prefix
from buffer.operations.operation import Fetch, Operation, Reply, ScriptCall
from buffer.store import incoming
from tests.simulation.lua import Scripts
from tests.simulation.memory_redis import MemoryRedis

T = TypeVar("T")


class SimulatedStore:
    """Runs the operations of `buffer/operations`, one at a time, in no time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._scripts = Scripts(MemoryRedis(clock))
        self._prefix = run_prefix("scale")

    def run(self, operation: Operation[T]) -> T:
        """Carry an operation out."""
        return operation.carry_out(
            lambda call: self._fetch(call) if isinstance(call, Fetch) else self._call(call)
        )

    def _fetch(self, fetch: Fetch) -> Reply:
        keys = [(self._prefix + key).encode() for key in fetch.keys]
        return self._scripts.database.execute(b"MGET", *keys)

    def _call(self, call: ScriptCall) -> Reply:
        for place, record in incoming(self._prefix, call.records).items():
            self._scripts.database.execute(b"SET", place.encode(), record)
        return self._scripts.run(load_script(call.script), self._prefix, call.arguments)
