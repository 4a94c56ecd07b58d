"""Dispatch: reads messages of a socket, has each answered in a task of its own, sends replies.

Consumes frames of [routing id, message]; waits for the next, or for room. A full broker stops
reading and so holds all senders back; a peer over its share, or whose key was revoked, is refused
before its message is decoded, one without permission after that. Whatever a peer sends, the next
message is read.
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog
import zmq

from broker.protocol.codec import Envelope, decode, encode, sequence_of
from broker.protocol.messages import LeaseReply, LeaseRequest, Refusal
from broker.transport.allow_list import AllowList, Member
from broker.transport.router import Router
from configs.errors import RecordError, StoreError
from configs.settings import BrokerSettings

from .admin import AdminService
from .components import Components
from .flow_control import ReplyLimiter, RequestLimiter, Slot, peer_share_bytes
from .leasing import UNSERVED
from .liveness import Peer
from .permissions import ADMIN_REQUESTS, check_permission

DRAIN_S = 2.0  # for requests that are at the store when the broker is asked to stop
REVOKED = Refusal("revoked", "this key has been taken off the allow-list; use another")
BUSY = Refusal("busy", "this peer has too much at the broker already; send the same again later")

log = structlog.get_logger()


class Dispatcher:
    """Answers the peers of one socket.

    Args:
        router: Bound, behind a `ZapAuthenticator`.
        allowed: The allow-list, checked for every message.
        parts: Of this broker.
        admin: Answers observers and operators.
        run: Name of the run.
        settings: Limits.
    """

    def __init__(
        self,
        router: Router,
        allowed: AllowList,
        parts: Components,
        admin: AdminService,
        *,
        run: str,
        settings: BrokerSettings,
    ) -> None:
        self._router = router
        self._allowed = allowed
        self._service = parts.service
        self._leasing = parts.leasing
        self._peers = parts.peers
        self._audit = parts.audit
        self._admin = admin
        self._run = run
        self._max_bytes = settings.max_message_bytes
        share = peer_share_bytes(settings)
        self._limiter = RequestLimiter(max_message_bytes=self._max_bytes, max_peer_bytes=share)
        clock = asyncio.get_running_loop().time
        self._reply_limiter = ReplyLimiter(max_peer_bytes=share, clock=clock)
        self._requests: set[asyncio.Task[None]] = set()

    async def receive(self) -> None:
        """Read messages and give each a task of its own, as long as there is room."""
        while True:
            await self._limiter.wait_for_room()
            frames = await self._router.receive()
            if len(frames) != 2:
                self._audit.record_refusal("frames", str(frames[-1].get("User-Id")))
                await asyncio.sleep(0)  # a flood must not keep the others from their turn
                continue
            key = str(frames[1].get("User-Id"))
            route, frame = frames[0].bytes, frames[1].buffer
            # Its key may have been removed while its holder is connected.
            member = self._allowed.member(key.encode())
            # Here and not in the task: in a burst `recv` never yields, so no task would have begun.
            slot = None if member is None else self._limiter.admit(len(frame), route)
            if member is None or slot is None:
                refusal, peer = (REVOKED, key) if member is None else (BUSY, member.name)
                self._refuse(route, sequence_of(frame), refusal, peer)
                await asyncio.sleep(0)
                continue
            task = asyncio.create_task(self._request(route, frame, key, member, slot))
            self._requests.add(task)
            task.add_done_callback(partial(self._finished, slot))

    async def drain(self) -> None:
        """Finish the requests that are at the store."""
        log.info("stopping", requests=len(self._requests))
        self._leasing.close()
        if self._requests:
            _, late = await asyncio.wait(self._requests, timeout=DRAIN_S)
            for request in late:
                request.cancel()

    def _finished(self, slot: Slot, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        slot.release()

    async def _request(
        self, route: bytes, frame: memoryview, key: str, member: Member, slot: Slot
    ) -> None:
        """Answer one message; whatever happens, the broker goes on."""
        try:
            try:
                envelope = decode(frame, max_bytes=self._max_bytes)
            except RecordError as error:
                refusal = Refusal("malformed", str(error))
                self._refuse(route, sequence_of(frame), refusal, member.name)
                return
            del frame  # a LEASE that waits for work must not keep its frame alive
            reply = await self._answer(envelope, key, member)
            slot.release()  # a LEASE may now wait for work
            peer = self._peers.observe(envelope.inc, key)
            if isinstance(reply, LeaseReply) and peer is not None:
                await self._answer_lease(route, envelope, peer, reply)
            elif isinstance(reply, Refusal):
                self._refuse(route, envelope.seq, reply, member.name)
            elif reply is not None:
                self._send(route, envelope.seq, reply)
        except Exception:  # the edge of the loop: one request must not end the others
            log.exception("a request failed; its actor will send it again")

    async def _answer(self, envelope: Envelope, key: str, member: Member) -> object | None:
        refusal = check_permission(member, envelope.message)
        if refusal is not None:
            return refusal
        if isinstance(envelope.message, ADMIN_REQUESTS):
            return await self._admin.answer(envelope, member)
        return await self._service.answer(envelope, key)

    async def _answer_lease(
        self, route: bytes, envelope: Envelope, peer: Peer, first: LeaseReply
    ) -> None:
        """Let an unserved LEASE wait; release a grant that cannot be sent."""
        reply: object | None = first
        if first.status in UNSERVED:
            request = envelope.message
            assert isinstance(request, LeaseRequest)
            try:
                reply = await self._leasing.wait(peer, envelope.seq, request)
            except StoreError as error:
                self._leasing.pause_reaping()
                reply = Refusal("store", f"the store does not answer; send again later: {error}")
        if reply is None:
            return
        was_sent = self._send(route, envelope.seq, reply)
        if not was_sent and isinstance(reply, LeaseReply) and reply.leases:
            await self._leasing.release_unsent(peer, reply)

    def _refuse(self, route: bytes, seq: int, refusal: Refusal, peer: str) -> None:
        self._audit.record_refusal(refusal.code, peer, refusal.text)
        self._send(route, seq, refusal)

    def _send(self, route: bytes, seq: int, reply: object) -> bool:
        """Hand a reply to ZeroMQ; False if the peer is gone or does not read."""
        frame = encode(reply, run=self._run, incarnation="broker", seq=seq)
        if not self._reply_limiter.allows(route, len(frame)):
            self._audit.record_refusal("unread", "a peer that is sent too much")
            return False
        try:
            self._router.send(route, frame)
        except zmq.ZMQError as error:  # EAGAIN or EHOSTUNREACH: it will ask again
            log.debug("reply dropped", reason=str(error))
            return False
        return True
