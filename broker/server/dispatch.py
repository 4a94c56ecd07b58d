"""Between socket and service: reads messages, answers each by a task of its own, sends replies.

Consumes frames of [routing id, message]. A full intake stops the reading and so holds all senders
back; a peer over its share, without a right, or whose key was revoked is refused before its message
is decoded. Whatever a peer sends, the next message is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog
import zmq

from broker.protocol.codec import Envelope, decode, encode, sequence_of
from broker.protocol.messages import LeaseReply, LeaseRequest, Refusal
from broker.transport.allow_list import AllowList, Member
from broker.transport.router import Router
from configs.errors import RecordError, StoreError
from configs.settings import BrokerSettings

from .admin import Desk
from .audit import Audit
from .flow_control import Intake, Place
from .leasing import UNSERVED, Leasing
from .liveness import Liveness, Peer
from .outflow import Outflow
from .permissions import DESK, refuse
from .service import Service

DRAIN_S = 2.0  # for requests that are at the store when the broker is asked to stop
REVOKED = Refusal("revoked", "this key has been taken off the allow-list; use another")
BUSY = Refusal("busy", "this peer has too much at the broker already; send the same again later")

log = structlog.get_logger()


class Reception:
    """Answers the peers of one socket.

    Args:
        router: Bound, behind a door.
        allowed: Who may speak now, asked for every message.
        run: Name of the run.
        settings: Limits.
        service: Answers actors.
        leasing: Answers those who wait for work.
        desk: Answers observers and operators.
        peers: Who has said HELLO.
        audit: Is told of refusals.
        on_outage: Is called when the store does not answer.
    """

    def __init__(
        self,
        router: Router,
        allowed: AllowList,
        *,
        run: str,
        settings: BrokerSettings,
        service: Service,
        leasing: Leasing,
        desk: Desk,
        peers: Liveness,
        audit: Audit,
        on_outage: Callable[[], None],
    ) -> None:
        self._router = router
        self._allowed = allowed
        self._run = run
        self._max_bytes = settings.max_message_bytes
        self._service = service
        self._leasing = leasing
        self._desk = desk
        self._peers = peers
        self._audit = audit
        self._on_outage = on_outage
        share = settings.max_inflight_mb_per_actor * 2**20
        self._intake = Intake(max_message_bytes=self._max_bytes, max_peer_bytes=share)
        self._outflow = Outflow(max_peer_bytes=share, clock=asyncio.get_running_loop().time)
        self._requests: set[asyncio.Task[None]] = set()

    async def receive(self) -> None:
        """Read messages and give each a task of its own, as long as the intake has room."""
        while True:
            await self._intake.room()
            frames = await self._router.receive()
            if len(frames) != 2:
                self._audit.refused("frames", str(frames[-1].get("User-Id")))
                await asyncio.sleep(0)  # a flood must not keep the others from their turn
                continue
            key = str(frames[1].get("User-Id"))
            route, frame = frames[0].bytes, frames[1].buffer
            # Its key may have been removed while its holder is connected.
            member = self._allowed.member(key.encode())
            # Here and not in the task: in a burst `recv` never yields, so no task would have begun.
            place = None if member is None else self._intake.admit(len(frame), route)
            if member is None or place is None:
                refusal, peer = (REVOKED, key) if member is None else (BUSY, member.name)
                self._refuse(route, sequence_of(frame), refusal, peer)
                await asyncio.sleep(0)
                continue
            task = asyncio.create_task(self._request(route, frame, key, member, place))
            self._requests.add(task)
            task.add_done_callback(partial(self._finished, place))

    async def drain(self) -> None:
        """Finish what is at the store."""
        log.info("stopping", requests=len(self._requests))
        self._leasing.close()
        if self._requests:
            _, late = await asyncio.wait(self._requests, timeout=DRAIN_S)
            for request in late:
                request.cancel()

    def _finished(self, place: Place, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        place.leave()

    async def _request(
        self, route: bytes, frame: memoryview, key: str, member: Member, place: Place
    ) -> None:
        """Answer one message; whatever happens, the broker goes on."""
        try:
            try:
                envelope = decode(frame, max_bytes=self._max_bytes)
            except RecordError as error:
                refusal = Refusal("malformed", str(error))
                self._refuse(route, sequence_of(frame), refusal, member.name)
                return
            del frame  # a LEASE that waits for work holds nothing of what came with it
            reply = await self._answer(envelope, key, member)
            place.leave()  # a LEASE may now wait for work
            peer = self._peers.hear(envelope.inc, key)
            if isinstance(reply, LeaseReply) and peer is not None:
                await self._answer_lease(route, envelope, peer, reply)
            elif isinstance(reply, Refusal):
                self._refuse(route, envelope.seq, reply, member.name)
            elif reply is not None:
                self._send(route, envelope.seq, reply)
        except Exception:  # the edge of the loop: one request must not end the others
            log.exception("a request failed; its actor will send it again")

    async def _answer(self, envelope: Envelope, key: str, member: Member) -> object | None:
        refusal = refuse(member, envelope.message)
        if refusal is not None:
            return refusal
        if isinstance(envelope.message, DESK):
            return await self._desk.answer(envelope, member)
        return await self._service.answer(envelope, key)

    async def _answer_lease(
        self, route: bytes, envelope: Envelope, peer: Peer, first: LeaseReply
    ) -> None:
        """Park an unserved LEASE, and do not let a grant vanish with the connection."""
        reply: object | None = first
        if first.status in UNSERVED:
            request = envelope.message
            assert isinstance(request, LeaseRequest)
            try:
                reply = await self._leasing.wait(peer, envelope.seq, request)
            except StoreError as error:
                self._on_outage()
                reply = Refusal("store", f"the store does not answer; send again later: {error}")
        if reply is None:
            return
        was_sent = self._send(route, envelope.seq, reply)
        if not was_sent and isinstance(reply, LeaseReply) and reply.leases:
            await self._leasing.take_back(peer, reply)

    def _refuse(self, route: bytes, seq: int, refusal: Refusal, peer: str) -> None:
        self._audit.refused(refusal.code, peer, refusal.text)
        self._send(route, seq, refusal)

    def _send(self, route: bytes, seq: int, reply: object) -> bool:
        """Hand a reply to ZeroMQ; False if the peer is gone or does not read."""
        frame = encode(reply, run=self._run, incarnation="broker", seq=seq)
        if not self._outflow.allows(route, len(frame)):
            self._audit.refused("unread", "a peer that is sent too much")
            return False
        try:
            self._router.send(route, frame)
        except zmq.ZMQError as error:  # EAGAIN or EHOSTUNREACH: it will ask again
            log.debug("reply dropped", reason=str(error))
            return False
        return True
