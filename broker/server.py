"""The broker's process: a ROUTER between actors and the store, and the chores that run beside it.

Consumes frames of [routing id, message]; waits for the store; a full intake stops the reading
and so holds the senders back. Stateless: killed at any moment, it loses nothing that it has
acknowledged. Refuses to know what messages mean (`service.py`) and what is in the store.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog
import zmq
import zmq.asyncio

from buffer import operations
from buffer.store import AsyncStore
from configs.errors import RecordError, SettingsError, StoreError
from configs.settings import Settings

from .auth import Door
from .board import MEMORY_S, PUBLICATION_S, Board
from .codec import Envelope, decode, encode, sequence_of
from .intake import Intake, Place
from .keys import load_pair
from .leasing import UNSERVED, Leasing
from .liveness import Liveness, Peer
from .messages import RECORD_MARGIN, LeaseReply, LeaseRequest, Refusal
from .reaper import BATCH, Reaper
from .service import Service
from .sockets import bind_router, bound_endpoint
from .turnstile import TICK_S

HOUSEKEEPING_S = 2.0  # figures for `nyala status`, removed keys, long silent peers
DRAIN_S = 2.0  # for requests that are at the store when the broker is asked to stop

log = structlog.get_logger()


class Broker:
    """Serves one run at one address."""

    def __init__(self, settings: Settings, store: AsyncStore, *, keys: Path) -> None:
        """Build the parts; nothing listens yet.

        Args:
            settings: Of the run.
            store: Connected to the run's Redis.
            keys: Folder of the run's keys.

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
        self._peers = Liveness(
            heartbeat_timeout_s=broker.heartbeat_timeout_s,
            max_actors=broker.max_actors,
            clock=time.monotonic,
        )
        self._reaper = Reaper(grace_s=broker.lease_timeout_s, clock=time.monotonic)
        self._board = Board(store, pause_at_memory=settings.buffer.pause_at_memory)
        self._leasing = Leasing(store, broker, self._peers, self._board)
        self._service = Service(
            store,
            settings,
            peers=self._peers,
            board=self._board,
            leasing=self._leasing,
            on_outage=self._reaper.hold,
        )
        self._intake = Intake(max_message_bytes=broker.max_message_bytes)
        self._requests: set[asyncio.Task[None]] = set()

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
        context = zmq.asyncio.Context()
        try:
            with Door(context, self._keys) as door:
                socket = bind_router(
                    context,
                    self._settings.endpoint,
                    keys=self._pair,
                    max_message_bytes=self._settings.max_message_bytes,
                )
                endpoint = bound_endpoint(socket)
                log.info("listening", stage="listening", endpoint=endpoint)
                if on_ready is not None:
                    on_ready(endpoint)
                await self._serve(socket, door, stop)
                socket.close()  # its linger lets last replies leave
        finally:
            context.destroy()

    async def _serve(self, socket: zmq.asyncio.Socket, door: Door, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(work)
                for work in (
                    self._receive(socket, door),
                    _every(TICK_S, self._tick, stop),
                    _every(PUBLICATION_S, self._board.read_publication, stop),
                    _every(MEMORY_S, self._board.read_memory, stop),
                    _every(self._settings.reap_every_s, self._reap, stop),
                    _every(HOUSEKEEPING_S, lambda: self._keep_house(door), stop),
                )
            ]
            await stop.wait()
            log.info("stopping", requests=len(self._requests))
            for loop in loops:
                loop.cancel()
        self._leasing.close()
        if self._requests:
            _, late = await asyncio.wait(self._requests, timeout=DRAIN_S)
            for request in late:
                request.cancel()

    async def _receive(self, socket: zmq.asyncio.Socket, door: Door) -> None:
        """Read messages and give each a task of its own, as long as the intake has room."""
        while True:
            await self._intake.room()
            frames = await socket.recv_multipart(copy=False)
            key = str(frames[-1].get("User-Id"))
            if len(frames) != 2 or door.allowed.name_of(key.encode()) is None:
                # Not from our clients; and a key may be removed while its holder is connected.
                log.warning("message dropped", frames=len(frames), key=key)
                continue
            route, frame = frames[0].bytes, frames[1].bytes
            # Here and not in the task: in a burst `recv` never yields, so no task would have begun.
            place = self._intake.admit(len(frame))
            task = asyncio.create_task(self._request(socket, route, frame, key, place))
            self._requests.add(task)
            task.add_done_callback(partial(self._finished, place))

    def _finished(self, place: Place, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        place.leave()

    async def _request(
        self, socket: zmq.asyncio.Socket, route: bytes, frame: bytes, key: str, place: Place
    ) -> None:
        """Answer one message; whatever happens, the broker goes on."""
        try:
            try:
                envelope = decode(frame, max_bytes=self._settings.max_message_bytes)
            except RecordError as error:
                seq = sequence_of(frame, max_bytes=self._settings.max_message_bytes)
                await self._send(socket, route, seq, Refusal("malformed", str(error)))
                return
            reply = await self._service.answer(envelope, key)
            place.leave()  # a LEASE may now wait for work
            peer = self._peers.hear(envelope.inc, key)
            if isinstance(reply, LeaseReply) and peer is not None:
                await self._answer_lease(socket, route, envelope, peer, reply)
            elif reply is not None:
                await self._send(socket, route, envelope.seq, reply)
        except Exception:  # the edge of the loop: one request must not end the others
            log.exception("a request failed; its actor will send it again")

    async def _answer_lease(
        self,
        socket: zmq.asyncio.Socket,
        route: bytes,
        envelope: Envelope,
        peer: Peer,
        first: LeaseReply,
    ) -> None:
        """Park an unserved LEASE, and do not let a grant vanish with the connection."""
        reply: object | None = first
        if first.status in UNSERVED:
            request = envelope.message
            assert isinstance(request, LeaseRequest)
            try:
                reply = await self._leasing.wait(peer, envelope.seq, request)
            except StoreError as error:
                self._reaper.hold()
                reply = Refusal("store", f"the store does not answer; send again later: {error}")
        if reply is None:
            return
        was_sent = await self._send(socket, route, envelope.seq, reply)
        if not was_sent and isinstance(reply, LeaseReply) and reply.leases:
            await self._leasing.take_back(peer, reply)

    async def _send(
        self, socket: zmq.asyncio.Socket, route: bytes, seq: int, reply: object
    ) -> bool:
        """Hand a reply to ZeroMQ; False if the peer is gone or does not read."""
        frame = encode(reply, run=self._run, incarnation="broker", seq=seq)
        try:
            await socket.send_multipart([route, frame], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EAGAIN or EHOSTUNREACH: it will ask again
            log.debug("reply dropped", reason=str(error))
            return False
        return True

    async def _tick(self) -> None:
        self._leasing.row.open()

    async def _reap(self) -> None:
        if not self._reaper.may_reap():
            return
        try:
            ids = await self._store.run(
                operations.reap(max_attempts=self._settings.max_attempts, batch=BATCH)
            )
        except StoreError:
            self._reaper.hold()
            raise
        if ids:
            log.info("expired leases returned", count=len(ids))

    async def _keep_house(self, door: Door) -> None:
        door.allowed.refresh()
        for incarnation in self._peers.expire():
            log.info("actor forgotten after long silence", actor=incarnation)
        await self._service.report()


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
