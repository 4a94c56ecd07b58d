"""The broker's process: a ROUTER between actors and the store, and periodic chores beside it.

Listens and runs the chores; `dispatch.py` answers what is read. Stateless: killed at any moment, it
loses nothing that it has acknowledged. `service.py` decides what messages mean.

Consumes requests of peers (`Dispatcher.receive`). Each chore waits for its period. A stop request
unblocks and ends all of them; then requests that are at the store are finished, within `DRAIN_S`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import structlog
import zmq

from broker.transport.enrolled import EnrolledKeys
from broker.transport.keys import load_pair
from broker.transport.sockets import Router, advertised, bind_router, bound_endpoint, reachable
from broker.transport.zap import ZapAuthenticator
from buffer import operations
from buffer.client.scripts import load_all
from buffer.live_brokers import STOPPED
from buffer.operations.run import broker_seen
from buffer.store import AsyncStore
from configs.errors import StoreError, StoreUnfit, first_error
from configs.settings import Settings

from .admin import AdminService, Enrolment
from .dispatch import Dispatcher, assemble
from .flow_control import receive_hwm
from .key_watch import KEY_CHECK_S, KeyWatch
from .leasing import TICK_S
from .store_cache import BROKERS_S, MEMORY_S, PUBLICATION_S

HOUSEKEEPING_S = 2.0  # figures for `nyala status`, long silent peers

log = structlog.get_logger()


class Broker:
    """Serves one run at one address."""

    def __init__(
        self, settings: Settings, store: AsyncStore, *, keys: Path, audit_file: Path | None = None
    ) -> None:
        """Build the parts; nothing listens yet.

        Args:
            settings: Settings of the run.
            store: Store of the run's Redis.
            keys: Folder of the run's keys.
            audit_file: File of joins, refusals and revocations; None = the log alone.

        Raises:
            SettingsError: `buffer.object_store` or the broker's key cannot be used.
        """
        self._of_run = settings
        self._run = settings.run.name
        self._settings = settings.broker
        self._store = store
        load_all()
        self._keys = keys
        self.parts = assemble(settings, store, audit_file=audit_file)
        self._pair = load_pair(keys, "broker")
        self._endpoint = settings.broker.endpoint
        store.watch(self._on_new_server)

    async def serve(
        self, stop: asyncio.Event, *, on_ready: Callable[[str], None] | None = None
    ) -> None:
        """Serve until `stop` is set, then finish the requests under way, within `DRAIN_S`.

        Args:
            stop: Ends the service.
            on_ready: Called with the address that the broker listens on.

        Raises:
            SettingsError: The address cannot be listened on, this machine's own address is not
                known, or the Redis cannot hold a run.
        """
        context = zmq.Context()
        audit = self.parts.audit
        try:
            with ZapAuthenticator(
                context,
                self._keys,
                on_refused=lambda address: audit.record_refusal("unknown key", address),
            ) as authenticator:
                socket = bind_router(
                    context,
                    self._settings.endpoint,
                    keys=self._pair,
                    max_message_bytes=self._settings.max_message_bytes,
                    receive_hwm=receive_hwm(self._settings),
                )
                bound = bound_endpoint(socket)
                self._endpoint = self._advertised_endpoint(bound)
                log.info("listening", stage="listening", endpoint=bound, reached_as=self._endpoint)
                if on_ready is not None:
                    on_ready(bound)
                await self._serve(Router(socket), authenticator, stop)
                socket.close()  # its linger lets last replies leave
        except ExceptionGroup as group:
            raise first_error(group) from group
        finally:
            context.destroy()

    async def _serve(
        self, router: Router, authenticator: ZapAuthenticator, stop: asyncio.Event
    ) -> None:
        watch = self._key_watch(router, authenticator)
        enrolment = self._enrolment(authenticator)
        dispatcher = self._dispatcher(router, authenticator, watch, enrolment)

        async def keep_house() -> None:
            enrolment.keep_house()
            await self._keep_house()

        async def check_keys() -> None:
            authenticator.check_zap_thread()
            await watch.apply_key_changes()

        async def tick() -> None:
            dispatcher.tick()
            self.parts.leasing.queue.wake()

        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(work)
                for work in (
                    dispatcher.receive(),
                    _every(TICK_S, tick, stop),
                    _every(TICK_S, self.parts.service.conversations.look_for_news, stop),
                    _every(PUBLICATION_S, self.parts.cache.refresh_publication, stop),
                    _every(BROKERS_S, self.parts.cache.refresh_brokers, stop),
                    _every(MEMORY_S, self.parts.cache.refresh_memory, stop),
                    _every(MEMORY_S, self.parts.cache.refresh_closed, stop),
                    _every(self.parts.leasing.reap_every_s, self.parts.leasing.reap, stop),
                    _every(KEY_CHECK_S, check_keys, stop),
                    _every(HOUSEKEEPING_S, keep_house, stop),
                )
            ]
            await stop.wait()
            for loop in loops:
                loop.cancel()
        await dispatcher.drain()
        with suppress(StoreError):  # other brokers will see its silence instead
            await self._store.run(broker_seen(self._endpoint, STOPPED))

    def _advertised_endpoint(self, bound: str) -> str:
        """Return the address of this broker that actors are told, also by other brokers."""
        address = self._settings.advertise
        return reachable(bound) if address is None else advertised(bound, address)

    def _key_watch(self, router: Router, authenticator: ZapAuthenticator) -> KeyWatch:
        return KeyWatch(
            router,
            authenticator.allowed,
            keys=self._keys,
            pair=self._pair,
            peers=self.parts.peers,
            audit=self.parts.audit,
        )

    def _enrolment(self, authenticator: ZapAuthenticator) -> Enrolment:
        most = self._settings.max_actors_per_enrolment
        return Enrolment(
            EnrolledKeys(self._keys, authenticator.allowed, max_keys=most),
            limit=f"broker.max_actors_per_enrolment = {most}",
            peers=self.parts.peers,
            audit=self.parts.audit,
            clock=time.monotonic,
        )

    def _dispatcher(
        self,
        router: Router,
        authenticator: ZapAuthenticator,
        watch: KeyWatch,
        enrolment: Enrolment,
    ) -> Dispatcher:
        admin = AdminService(
            self._store,
            settings=self._of_run,
            keys=self._keys,
            peers=self.parts.peers,
            audit=self.parts.audit,
            enrolment=enrolment,
            on_change=watch.check_allow_list,
        )
        return Dispatcher(
            router,
            authenticator.allowed,
            self.parts,
            admin,
            run=self._run,
            settings=self._settings,
        )

    def _on_new_server(self, run_id: str, state: str) -> bool:
        """Accept a Redis that is new to this broker; the store itself delays requests if needed."""
        log.info("Redis is new to this broker", run_id=run_id, state=state)
        self.parts.leasing.pause_reaping()
        self.parts.service.conversations.read_all_anew()
        return True

    async def _keep_house(self) -> None:
        peers, audit = self.parts.peers, self.parts.audit
        for incarnation in peers.expire():
            audit.record("actor lost", actor=incarnation, actors=len(peers))
        audit.flush()
        await self.parts.service.report()
        suspect = sum(map(peers.is_suspect, peers))
        figures = {"at": time.time(), "actors": len(peers), "suspect": suspect}
        refused = {f"refused_{code}": count for code, count in audit.refusals.items()}
        await self._store.run(broker_seen(self._endpoint, figures | refused))
        peers.in_store = await self._actors_in_store()

    async def _actors_in_store(self) -> frozenset[str]:
        """Return the actors of the run that were heard recently, where there are other brokers."""
        if len(self.parts.cache.brokers) < 2:
            return frozenset()
        limit_s = self._settings.heartbeat_timeout_s
        seen = await self._store.run(operations.actors())
        return frozenset(actor.incarnation for actor in seen if actor.is_present(limit_s))


async def _every(
    period_s: float, chore: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Repeat a chore with jitter; a failure is reported once and tried again.

    A chore fails while the store cannot be reached, or while connections have taken all files that
    this process may open. The broker goes on with its last readings.
    """
    is_failing = False
    # Not by cancellation alone: `asyncio.wait_for` of Python 3.11, which the Redis client uses,
    # swallows one that comes together with its result.
    while not stop.is_set():
        try:
            await chore()
            is_failing = False
        except StoreUnfit:
            raise
        except (StoreError, OSError) as error:
            if not is_failing:
                log.warning("a periodic task failed and is tried again", reason=str(error))
            is_failing = True
        await asyncio.sleep(period_s * random.uniform(0.8, 1.2))
