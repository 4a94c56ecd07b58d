"""The broker's page of `/metrics`: its actors, and the counts of the store that it serves.

The store is read every `LOOK_S`, and only where the page is served. Each of several brokers shows
the store's counts, and its own actors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from broker.server.dispatch import BrokerComponents
from buffer import operations
from buffer.operations.values import RedisMemory, Stats
from buffer.store import AsyncStore
from configs.errors import StoreError
from configs.fleet import first_wanted
from configs.metrics import LOOP_STALLED_S, Health, Metric, Pulse, Value
from configs.metrics_serving import serving
from configs.settings import Settings
from configs.validation.store import max_units_in_flight

LOOK_S = 5.0  # as often as Prometheus asks; counting takes Redis a fraction of a millisecond

ACTORS = Metric("nyala_broker_actors", "gauge", "actors", "Actors that this broker serves.")
SUSPECT = Metric(
    "nyala_broker_suspect_actors",
    "gauge",
    "actors",
    "Actors that get no work because they are silent for too long.",
)
WANTED = Metric(
    "nyala_actors_wanted",
    "gauge",
    "actors",
    "Actors that the run wants, for the scheduler that starts and ends them (`docs/fleet.md`).",
)
WAITING = Metric(
    "nyala_broker_waiting_requests",
    "gauge",
    "requests",
    "Requests of actors that wait for work.",
)
REFUSED = Metric(
    "nyala_broker_refusals_total", "counter", "messages", "Refused messages.", label="code"
)
REQUEUE = Metric(
    "nyala_broker_requeue_seconds",
    "histogram",
    "s",
    "Time from the last sign of life of an actor until its lease expired.",
)
RECOVERY = Metric(
    "nyala_broker_recovery_seconds",
    "histogram",
    "s",
    "Time from the last sign of life of a silent actor until another had its task, after its "
    "lease had expired or been shared.",
)
CLOSED = Metric(
    "nyala_broker_leasing_closed",
    "gauge",
    "0 or 1",
    "1 = nothing is leased: the run is `paused`, or the `memory` of Redis is full.",
    label="reason",
)
SUSPENDED = Metric(
    "nyala_broker_suspended_keys", "gauge", "keys", "Keys that get no leases after failures."
)
TASKS = Metric(
    "nyala_buffer_tasks",
    "gauge",
    "tasks",
    "Training tasks by state; `committed`, `dropped`, `dead` and `cancelled` are final.",
    label="state",
)
CREATED = Metric("nyala_buffer_created_tasks_total", "counter", "tasks", "Tasks created.")
COMMITTED = Metric(
    "nyala_buffer_committed_tasks_total", "counter", "tasks", "Tasks trained and checkpointed."
)
DROPPED = Metric(
    "nyala_buffer_dropped_tasks_total", "counter", "tasks", "Tasks dropped.", label="reason"
)
DEAD = Metric("nyala_buffer_dead_letters", "gauge", "tasks", "Tasks that are not tried any more.")
OPEN = Metric(
    "nyala_buffer_open_units", "gauge", "units", "Groups that are begun and not yet complete."
)
COMPLETE = Metric(
    "nyala_buffer_complete_units", "gauge", "units", "Complete groups that no batch has claimed."
)
IN_FLIGHT = Metric(
    "nyala_buffer_units_in_flight",
    "gauge",
    "units",
    "Groups between their first lease and their training.",
)
ADMITTED = Metric(
    "nyala_buffer_admitted_units",
    "gauge",
    "units",
    "Upper bound of the units in flight; beyond it no new group is leased.",
)
TRAINED = Metric("nyala_buffer_trained_step", "gauge", "batches", "Batches trained.")
CHECKPOINTED = Metric(
    "nyala_buffer_committed_step", "gauge", "batches", "Newest batch inside a checkpoint."
)
MEMORY = Metric("nyala_buffer_memory_bytes", "gauge", "bytes", "Memory that Redis uses.")
MEMORY_LIMIT = Metric(
    "nyala_buffer_memory_limit_bytes", "gauge", "bytes", "Redis' maxmemory; 0 = none."
)

METRICS = (
    *(ACTORS, WANTED, SUSPECT, WAITING, REFUSED, REQUEUE, RECOVERY, CLOSED, SUSPENDED),
    *(TASKS, CREATED, COMMITTED, DROPPED, DEAD, OPEN, COMPLETE, IN_FLIGHT, ADMITTED),
    *(TRAINED, CHECKPOINTED, MEMORY, MEMORY_LIMIT),
)


class BrokerPage:
    """Figures and health of one broker; read from the threads of the HTTP server."""

    def __init__(self, parts: BrokerComponents, store: AsyncStore, settings: Settings) -> None:
        self._parts, self._store, self._settings = parts, store, settings
        self._admitted = max_units_in_flight(settings.run, settings.buffer)
        self._stats: Stats | None = None
        self._memory = RedisMemory(0, 0)
        self._wanted = first_wanted(settings).actors
        self._waits_for: str | None = "its start"
        self._pulse = Pulse(LOOP_STALLED_S)
        self.health = Health(self._pulse, lambda: self._waits_for)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve the page during the block, if `broker.metrics_endpoint` is set.

        Raises:
            SettingsError: The address cannot be listened on.
        """
        endpoint, run = self._settings.broker.metrics_endpoint, self._settings.run
        with serving(
            endpoint, METRICS, self.values, self.health, run=run, role="broker", name="broker"
        ):
            work = (self._pulse.keep(), self._look()) if endpoint is not None else ()
            tasks = [asyncio.create_task(coroutine) for coroutine in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    def values(self) -> dict[str, Value | None]:
        """Return the values of `METRICS` now."""
        parts, closed = self._parts, self._parts.cache.closed
        return {
            ACTORS.name: len(parts.peers),
            WANTED.name: self._wanted,
            SUSPECT.name: sum(map(parts.peers.is_suspect, parts.peers)),
            WAITING.name: len(parts.leasing.queue),
            REFUSED.name: parts.audit.refusals,
            REQUEUE.name: parts.leasing.recoveries.requeues,
            RECOVERY.name: parts.leasing.recoveries.recoveries,
            CLOSED.name: {"paused": bool(closed.paused), "memory": parts.cache.is_full},
            SUSPENDED.name: len(closed.keys),
            **(_of_store(self._stats) if self._stats is not None else {}),
            ADMITTED.name: self._admitted,
            MEMORY.name: self._memory.used_bytes,
            MEMORY_LIMIT.name: self._memory.limit_bytes,
        }

    async def _look(self) -> None:
        """Read the store at intervals, until cancelled."""
        while True:
            try:
                self._stats = await self._store.run(operations.stats())
                self._memory = await self._store.run(operations.memory())
                shown = await self._store.run(operations.read_run_snapshot())
                self._wanted = _wanted_in(shown) or self._wanted
                is_recovering = self._stats.state == "RECOVERING"
                self._waits_for = "the recovery of its store" if is_recovering else None
            except StoreError as error:
                self._waits_for = f"its store: {error}"
            await asyncio.sleep(LOOK_S * random.uniform(0.8, 1.2))


class _Batch(msgspec.Struct):
    actors_wanted: int | None = None


class _SnapshotBatches(msgspec.Struct):
    batches: list[_Batch]


def _wanted_in(run_snapshot: bytes | None) -> int | None:
    """Read from the learner's newest batch how many actors it wants."""
    if run_snapshot is None:
        return None
    try:
        batches = msgspec.json.decode(run_snapshot, type=_SnapshotBatches).batches
    except msgspec.DecodeError:  # of a learner of another version
        return None
    return batches[-1].actors_wanted if batches else None


def _of_store(stats: Stats) -> dict[str, Value]:
    claimed = sum(claim.units for claim in stats.claims if claim.k > stats.version)
    return {
        TASKS.name: stats.by_state,
        CREATED.name: stats.created,
        COMMITTED.name: stats.committed,
        DROPPED.name: {"stale": 0, **stats.dropped},  # 0 at first, so that a rate counts the first
        DEAD.name: stats.dead - stats.purged,
        OPEN.name: stats.open_units,
        COMPLETE.name: stats.buffered_units,
        IN_FLIGHT.name: stats.open_units + stats.buffered_units + claimed,
        TRAINED.name: stats.version,
        CHECKPOINTED.name: stats.committed_step,
    }
