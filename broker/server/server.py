"""The broker's process: a ROUTER between actors and the store, and the chores that run beside it.

Listens and runs the chores; what is read is answered by `dispatch.py`. Stateless: killed at any
moment, it loses nothing that it has acknowledged. Refuses to know what messages mean (`service.py`)
and what is in the store.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
import zmq

from broker.protocol.messages import RECORD_MARGIN
from broker.transport.keys import load_pair
from broker.transport.router import Router
from broker.transport.sockets import RECEIVE_HWM, bind_router, bound_endpoint
from broker.transport.zap import Door
from buffer import operations
from buffer.operations.brokers import broker_seen
from buffer.store import AsyncStore
from configs.errors import SettingsError, StoreError
from configs.settings import Settings

from .admin import Desk
from .audit import Audit
from .dispatch import Reception
from .key_watch import Listener
from .leasing import Leasing
from .liveness import Liveness
from .reaper import BATCH, Reaper
from .revocation import LOOK_S, Revocation
from .service import Service
from .store_cache import MEMORY_S, PUBLICATION_S, Board
from .turnstile import TICK_S

HOUSEKEEPING_S = 2.0  # figures for `nyala status`, long silent peers

log = structlog.get_logger()


class Broker:
    """Serves one run at one address."""

    def __init__(
        self, settings: Settings, store: AsyncStore, *, keys: Path, audit_file: Path | None = None
    ) -> None:
        """Build the parts; nothing listens yet.

        Args:
            settings: Of the run.
            store: Connected to the run's Redis.
            keys: Folder of the run's keys.
            audit_file: Where joins, refusals and revocations are written; None = the log alone.

        Raises:
            SettingsError: the limits contradict each other, or the broker's key cannot be used.
        """
        broker, largest = settings.broker, settings.buffer.max_episode_bytes
        if broker.max_message_bytes < largest + RECORD_MARGIN:
            raise SettingsError(
                f"broker.max_message_bytes must be >= buffer.max_episode_bytes + {RECORD_MARGIN} = "
                f"{largest + RECORD_MARGIN}, got {broker.max_message_bytes}; "
                "the largest episode would cut its actor's connection"
            )
        self._settings = broker
        self._run = settings.run.name
        self._store = store
        self._keys = keys
        self._pair = load_pair(keys, "broker")
        self._endpoint = broker.endpoint
        self._audit = Audit(audit_file)
        self._peers = Liveness(
            heartbeat_timeout_s=broker.heartbeat_timeout_s,
            max_actors=broker.max_actors,
            max_actors_per_key=broker.max_actors_per_key,
            clock=time.monotonic,
        )
        self._reaper = Reaper(grace_s=broker.lease_timeout_s, clock=time.monotonic)
        store.watch(self._meet)
        self._board = Board(store, pause_at_memory=settings.buffer.pause_at_memory)
        self._leasing = Leasing(store, broker, self._peers, self._board)
        self._service = Service(
            store,
            settings,
            peers=self._peers,
            board=self._board,
            leasing=self._leasing,
            audit=self._audit,
            on_outage=self._reaper.hold,
        )

    async def serve(
        self, stop: asyncio.Event, *, on_ready: Callable[[str], None] | None = None
    ) -> None:
        """Serve until `stop` is set, then finish what is at the store.

        Args:
            stop: Ends the service.
            on_ready: Called with the address it listens on.

        Raises:
            SettingsError: the address cannot be listened on.
        """
        context = zmq.Context()
        try:
            with Door(context, self._keys, on_refused=self._turned_away) as door:
                socket = bind_router(
                    context,
                    self._settings.endpoint,
                    keys=self._pair,
                    max_message_bytes=self._settings.max_message_bytes,
                    receive_hwm=self._receive_hwm(),
                )
                self._endpoint = bound_endpoint(socket)
                log.info("listening", stage="listening", endpoint=self._endpoint)
                if on_ready is not None:
                    on_ready(self._endpoint)
                await self._serve(Router(socket), door, stop)
                socket.close()  # its linger lets last replies leave
        finally:
            context.destroy()

    async def _serve(self, router: Router, door: Door, stop: asyncio.Event) -> None:
        revocation = Revocation(door.allowed, self._peers, self._audit)
        reception = self._reception(router, door, revocation)
        listener = Listener(router, self._keys, pair=self._pair, audit=self._audit)
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(work)
                for work in (
                    reception.receive(),
                    _every(TICK_S, self._tick, stop),
                    _every(PUBLICATION_S, self._board.read_publication, stop),
                    _every(MEMORY_S, self._board.read_memory, stop),
                    _every(self._settings.reap_every_s, self._reap, stop),
                    _every(LOOK_S, lambda: self._look(door, revocation, listener), stop),
                    _every(HOUSEKEEPING_S, self._keep_house, stop),
                )
            ]
            await stop.wait()
            for loop in loops:
                loop.cancel()
        await reception.drain()

    def _reception(self, router: Router, door: Door, revocation: Revocation) -> Reception:
        desk = Desk(
            self._store,
            run=self._run,
            peers=self._peers,
            keys=self._keys,
            audit=self._audit,
            on_revoked=revocation.look,
        )
        return Reception(
            router,
            door.allowed,
            run=self._run,
            settings=self._settings,
            service=self._service,
            leasing=self._leasing,
            desk=desk,
            peers=self._peers,
            audit=self._audit,
            on_outage=self._reaper.hold,
        )

    async def _look(self, door: Door, revocation: Revocation, listener: Listener) -> None:
        door.check()
        revocation.look()
        await listener.look()

    async def _tick(self) -> None:
        self._leasing.row.open()

    def _meet(self, run_id: str, state: str) -> bool:
        """Work with a server that is new to this broker; the store itself closes what must wait."""
        log.info("Redis is new to this broker", run_id=run_id, state=state)
        self._reaper.hold()
        return True

    async def _reap(self) -> None:
        operation = operations.reap(
            max_attempts=self._settings.max_attempts,
            # In a grace it takes nothing, and lets the store know that somebody watches.
            batch=BATCH if self._reaper.may_reap() else 0,
            every_ms=round(1e3 * self._settings.reap_every_s),
        )
        try:
            ids = await self._store.run(operation)
        except StoreError:
            self._reaper.hold()
            raise
        if ids:
            log.info("expired leases returned", count=len(ids))

    async def _keep_house(self) -> None:
        for incarnation in self._peers.expire():
            log.info("actor forgotten after long silence", actor=incarnation)
        self._audit.settle()
        await self._service.report()
        figures = {"at": time.time(), "actors": len(self._peers)}
        refused = {f"refused_{code}": count for code, count in self._audit.refusals.items()}
        await self._store.run(broker_seen(self._endpoint, figures | refused))

    def _receive_hwm(self) -> int:
        """Choose how many messages ZeroMQ may hold for one peer, so that they keep to its share."""
        broker = self._settings
        share = broker.max_inflight_mb_per_actor * 2**20 // broker.max_message_bytes
        return max(2, min(RECEIVE_HWM, share))

    def _turned_away(self, address: str) -> None:
        self._audit.refused("unknown key", address)


async def _every(
    period_s: float, chore: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Repeat a chore with jitter; an unreachable store is reported once and tried again."""
    is_failing = False
    # Not by cancellation alone: `asyncio.wait_for` of Python 3.11, which the Redis client uses,
    # swallows one that comes together with its result.
    while not stop.is_set():
        try:
            await chore()
            is_failing = False
        except StoreError as error:
            if not is_failing:
                log.warning("the store does not answer", reason=str(error))
            is_failing = True
        await asyncio.sleep(period_s * random.uniform(0.8, 1.2))
