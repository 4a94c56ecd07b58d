"""Dispatch of requests: read from a socket, each answered in a task of its own; a broker's parts.

Consumes frames of [routing id, message]; waits for the next. Every message counts at once as a sign
of life, even if it is refused later, and goes into its lane: heartbeats overtake work. A message is
refused before it is decoded if it would wait too long, its peer is over its share, or its key was
revoked; a message without permission is refused after that. Whatever a peer sends, the next message
is read.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import zmq

from broker.protocol.codec import OLDEST_VERSION, Envelope, Header, decode, encode, header_of
from broker.protocol.messages import LeaseReply, LeaseRequest, Refusal
from broker.transport.allow_list import AllowList
from broker.transport.sockets import Router
from buffer.operations.values import holder_of
from buffer.record.object_store import ObjectStore
from buffer.store import AsyncStore
from configs.errors import RecordError, StoreError
from configs.settings import BrokerSettings, Settings

from .admin import AdminService
from .audit import Audit
from .conversations import LongPoll
from .flow_control import (
    MAX_REQUESTS_PER_PEER,
    ReplyLimiter,
    RequestLimiter,
    peer_share_bytes,
)
from .lanes import PROMPT, SHARE_OF_TIMEOUT, PendingRequest, ReadingClock, RequestLane
from .leasing import UNSERVED, Leasing
from .liveness import Liveness, PeerSession
from .service import Service
from .store_cache import StoreCache
from .validation import ADMIN_REQUESTS, check_permission, refuse_without_store

# --------------------------------------------------------------------------------------------------
# The parts of a broker that need no socket, and how they are joined.


@dataclass(frozen=True, slots=True)
class BrokerComponents:
    """The parts of a broker, one of each, shared by its loops."""

    audit: Audit
    peers: Liveness
    reading: ReadingClock
    """Clock by which the silence of peers is measured."""
    cache: StoreCache
    leasing: Leasing
    service: Service


def assemble(settings: Settings, store: AsyncStore, *, audit_file: Path | None) -> BrokerComponents:
    """Build the parts of a broker.

    Args:
        settings: Settings of the run.
        store: Store of the run's Redis.
        audit_file: File of joins, refusals and revocations; None = the log alone.
    """
    audit = Audit(audit_file)
    reading = ReadingClock(time.monotonic)
    peers = Liveness(
        heartbeat_timeout_s=settings.broker.heartbeat_timeout_s,
        max_actors=settings.broker.max_actors,
        max_actors_per_key=settings.broker.max_actors_per_key,
        clock=reading,
    )
    buffer = settings.buffer
    cache = StoreCache(
        store, pause_at_memory=buffer.pause_at_memory, max_run_bytes=buffer.max_run_bytes
    )
    objects = ObjectStore.from_settings(buffer, settings.run.name)
    leasing = Leasing(store, settings.broker, peers, cache, objects)
    service = Service(
        store,
        run=settings.run,
        broker=settings.broker,
        buffer=settings.buffer,
        agents=settings.agents,
        teachers=frozenset(map(settings.algorithm.scoring_teacher, settings.run.by_environment)),
        peers=peers,
        cache=cache,
        leasing=leasing,
        audit=audit,
    )
    return BrokerComponents(audit, peers, reading, cache, leasing, service)


# --------------------------------------------------------------------------------------------------
# Dispatch: reads messages of a socket, has each answered in a task of its own, sends replies.

DRAIN_S = 2.0  # for requests that are at the store when the broker is asked to stop
READ_AT_ONCE = 32  # messages; then requests that were read before get their turn
REVOKED = Refusal(
    "revoked", "this key has been taken off the allow-list; use one from `nyala keys add NAME`"
)
BUSY = "this broker, or the peer's share of its memory, is full; send the same again later"
PROBE = Refusal("probe", "another asks for the place of this actor")  # no request has seq 0
"""Refusal in the oldest version, which every peer can read."""

log = structlog.get_logger()


class Dispatcher:
    """Answers the peers of one socket.

    Args:
        router: Bound socket, behind a `ZapAuthenticator`.
        allowed: The allow-list, checked for every message.
        parts: Parts of this broker.
        admin: Answers observers and operators.
        run: Name of the run.
        settings: Limits.
    """

    def __init__(
        self,
        router: Router,
        allowed: AllowList,
        parts: BrokerComponents,
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
        self._limiter = RequestLimiter(
            max_message_bytes=self._max_bytes,
            max_key_bytes=settings.max_actors_per_key * share,
            max_key_requests=settings.max_actors_per_key * MAX_REQUESTS_PER_PEER,
        )
        clock = asyncio.get_running_loop().time
        self._reply_limiter = ReplyLimiter(max_peer_bytes=share, clock=clock)
        self._requests: set[asyncio.Task[None]] = set()
        self._reading = parts.reading
        self._most_late_s = settings.lease_timeout_s / 2
        most_wait_s = SHARE_OF_TIMEOUT * settings.heartbeat_timeout_s
        self._busy = Refusal("busy", BUSY, retry_after_s=most_wait_s)
        self._prompt, self._work = (
            RequestLane(self._start, self._shed, most_wait_s=most_wait_s, clock=clock)
            for _ in range(2)
        )
        self._peers.has_route = self._has_route
        self._probe = encode(PROBE, run=run, incarnation="broker", seq=0, version=OLDEST_VERSION)

    async def receive(self) -> None:
        """Read messages until cancelled, and put each into its lane or refuse it."""
        num_read = 0
        while True:
            frames = await self._router.receive()
            if len(frames) == 2:
                self._read(frames[0].bytes, frames[1])
            else:
                self._audit.record_refusal("frames", str(frames[-1].get("User-Id")))
            num_read += 1
            if num_read % READ_AT_ONCE == 0:  # in a burst `receive` never yields
                await asyncio.sleep(0)

    def tick(self) -> None:
        """Refuse requests that have waited too long, and start those that now can be answered.

        Called several times a second. It advances the clock by which the silence of actors is
        measured. While messages wait unread for long, and for one lease timeout after that, no
        lease is reaped.
        """
        if self._router.is_idle:
            self._reading.tick()
        elif self._reading.late_s() > self._most_late_s:  # heartbeats wait unread
            self._leasing.pause_reaping()
        self._prompt.advance()
        self._work.advance()

    async def drain(self) -> None:
        """Finish the requests under way, for at most `DRAIN_S`, and cancel the rest.

        LEASE requests that wait for work are answered at once.
        """
        log.info("stopping", requests=len(self._requests))
        self._leasing.close()
        self._service.conversations.close()
        if self._requests:
            _, late = await asyncio.wait(self._requests, timeout=DRAIN_S)
            for request in late:
                request.cancel()

    def _read(self, route: bytes, part: zmq.Frame) -> None:
        """Note a sign of life, and put a message into its lane or refuse it."""
        self._reading.hear(route)
        key, frame = str(part.get("User-Id")), part.buffer
        header = header_of(frame)
        # The key may have been removed while its holder is connected.
        member = self._allowed.member(key.encode())
        if member is None:
            self._refuse(route, header, REVOKED, key)
            return
        self._peers.observe(header.incarnation, key, route)
        is_prompt = header.op in PROMPT
        slot = self._limiter.admit(len(frame), member.tag, is_prompt=is_prompt)
        if slot is None:
            self._refuse(route, header, self._busy, member.name)
            return
        request = PendingRequest(route, frame, header, key, member, slot)
        (self._prompt if is_prompt else self._work).offer(request)

    def _start(self, request: PendingRequest) -> None:
        task = asyncio.create_task(self._request(request))
        self._requests.add(task)
        task.add_done_callback(partial(self._finished, request))

    def _finished(self, request: PendingRequest, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        request.release()

    def _shed(self, request: PendingRequest) -> None:
        request.release()
        self._refuse(request.route, request.header, self._busy, request.member.name)

    async def _request(self, request: PendingRequest) -> None:
        """Answer one message; whatever happens, the broker goes on."""
        try:
            assert request.frame is not None
            try:
                envelope = decode(request.frame, max_bytes=self._max_bytes)
            except RecordError as error:
                refusal = Refusal("malformed", str(error))
                self._refuse(request.route, request.header, refusal, request.member.name)
                return
            request.frame = None
            request.header = request.header._replace(seq=envelope.seq, version=envelope.v)
            reply = await self._answer(envelope, request)
            request.release()  # a LEASE may now wait for work, and a long poll for news
            if isinstance(reply, LongPoll):
                reply = await self._wait_for_news(reply)
            peer = self._peers.observe(envelope.inc, request.key, request.route)
            if isinstance(reply, LeaseReply) and peer is not None:
                await self._answer_lease(request, envelope, peer, reply)
            elif isinstance(reply, Refusal):
                self._refuse(request.route, request.header, reply, request.member.name)
            elif reply is not None:
                self._send(request.route, request.header, reply, request.member.tag)
        except Exception:  # the edge of the loop: one request must not end the others
            log.exception("a request failed; its actor will send it again")

    async def _answer(self, envelope: Envelope, request: PendingRequest) -> object | None:
        refusal = check_permission(request.member, envelope.message)
        if refusal is not None:
            return refusal
        if isinstance(envelope.message, ADMIN_REQUESTS):
            return await self._admin.answer(envelope, request.member)
        tag = request.member.tag
        return await self._service.answer(envelope, request.key, tag, request.route)

    async def _answer_lease(
        self, pending: PendingRequest, envelope: Envelope, peer: PeerSession, first: LeaseReply
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
                reply = refuse_without_store(error)
        if reply is None:
            return
        was_sent = self._send(pending.route, pending.header, reply, peer.tag)
        if not was_sent and isinstance(reply, LeaseReply) and reply.leases:
            await self._leasing.release_unsent(peer, reply)

    async def _wait_for_news(self, poll: LongPoll) -> object:
        try:
            return await poll.answer()
        except StoreError as error:
            self._leasing.pause_reaping()
            return Refusal("store", f"the store does not answer; send again later: {error}")

    def _has_route(self, route: bytes) -> bool:
        """Return whether a connection is open, which ZeroMQ tells only when a message is sent."""
        try:
            self._router.send(route, self._probe)
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN  # its queue is full
        return True

    def _refuse(self, route: bytes, header: Header, refusal: Refusal, peer: str) -> None:
        self._audit.record_refusal(refusal.code, peer, refusal.text)
        self._send(route, header, refusal, peer)

    def _send(self, route: bytes, header: Header, reply: object, tag: str) -> bool:
        """Hand a reply to ZeroMQ, in the peer's version; False if it is gone or does not read."""
        frame = encode(
            reply, run=self._run, incarnation="broker", seq=header.seq, version=header.version
        )
        if not self._reply_limiter.allows(route, holder_of(tag), len(frame)):
            self._audit.record_refusal("unread", "a peer that is sent too much")
            return False
        try:
            self._router.send(route, frame)
        except zmq.ZMQError as error:  # EAGAIN or EHOSTUNREACH: it will ask again
            log.debug("reply dropped", reason=str(error))
            return False
        return True
