"""LEASE: one try, waiting for work, and taking a grant back that did not reach its actor.

A request is granted at most once: the grant is kept with the request's `seq`, and a resent copy
gets the same leases. An actor that is silent, gone, or has asked anew gets nothing from an older
request.
"""

from __future__ import annotations

import time

import structlog

from broker.protocol.codec import decode_spec
from broker.protocol.messages import Lease, LeaseReply, LeaseRequest
from buffer import operations
from buffer.operations.values import LeasedTask
from buffer.store import AsyncStore
from configs.settings import BrokerSettings

from .liveness import Liveness, Peer
from .store_cache import Board
from .turnstile import Turnstile

UNSERVED = ("WAIT", "EMPTY")
HEADER_BYTES = 4096  # room for the rest of a reply beside chunks and specs
LEASE_BYTES = 64  # of one lease beside them

log = structlog.get_logger()


class Leasing:
    """Grants leases to peers."""

    def __init__(
        self, store: AsyncStore, settings: BrokerSettings, peers: Liveness, board: Board
    ) -> None:
        self._store = store
        self._settings = settings
        self._peers = peers
        self._board = board
        self._ttl_ms = int(settings.lease_timeout_s * 1000)
        self._is_closing = False
        self.row = Turnstile()
        """Where requests wait; the server opens it at every tick."""

    async def begin(self, peer: Peer, seq: int, request: LeaseRequest) -> LeaseReply | None:
        """Take a request and try once; None if it is already overtaken by a newer one."""
        if seq < peer.lease_seq:
            return None
        peer.lease_seq = seq
        peer.version = request.version
        return await self._try(peer, seq, request)

    async def wait(self, peer: Peer, seq: int, request: LeaseRequest) -> LeaseReply | None:
        """Try again whenever it is this request's turn, until the long poll is over."""
        ends_at = time.monotonic() + self._settings.long_poll_s
        while True:
            left_s = ends_at - time.monotonic()
            if left_s > 0 and not self._is_closing:
                await self.row.wait(left_s)
            reply = await self._try(peer, seq, request)
            is_over = self._is_closing or time.monotonic() >= ends_at
            if reply is None or reply.status not in UNSERVED or is_over:
                return reply

    async def stop(self, peer: Peer) -> None:
        """Grant a peer nothing more; returns when the reply to what it was granted is on its way.

        Else a request that it has given up may be granted what it releases as it leaves.
        """
        peer.is_draining = True
        async with peer.leasing:
            pass

    async def take_back(self, peer: Peer, reply: LeaseReply) -> None:
        """Release a grant whose reply could not be sent."""
        peer.granted = None
        tasks = [(lease.task_id, lease.fence) for lease in reply.leases]
        await self._store.run(operations.release(tasks))
        log.info("leases taken back: their actor is gone", count=len(tasks))

    def close(self) -> None:
        """Answer all who wait, now."""
        self._is_closing = True
        self.row.open(len(self.row))

    async def _try(self, peer: Peer, seq: int, request: LeaseRequest) -> LeaseReply | None:
        async with peer.leasing:
            if peer.granted is not None and peer.granted[0] == seq:
                return peer.granted[1]
            if peer.lease_seq != seq or self._peers.is_suspect(peer):
                return None
            if peer.is_draining:
                return self._reply("DONE", ())
            if self._board.is_full:
                return self._reply("WAIT", ())
            answer = await self._store.run(
                operations.lease(
                    peer.hello.incarnation,
                    ttl_ms=self._ttl_ms,
                    n=request.n,
                    version=request.version,
                )
            )
            if answer.status != "OK":
                return self._reply(answer.status, ())
            reply = self._reply("OK", await self._fitting(answer.tasks))
            peer.granted = (seq, reply)
            self.row.open(1)
            return reply

    async def _fitting(self, tasks: list[LeasedTask]) -> tuple[Lease, ...]:
        """Keep what fits into one reply, release the rest: resumed episodes bring chunks."""
        left = self._settings.max_message_bytes - HEADER_BYTES
        kept: list[Lease] = []
        excess: list[tuple[int, int]] = []
        for task in tasks:
            left -= LEASE_BYTES + len(task.spec) + sum(8 + len(chunk) for chunk in task.chunks)
            if left < 0 and kept:
                excess.append((task.task_id, task.fence))
                continue
            kept.append(
                Lease(
                    task_id=task.task_id,
                    fence=task.fence,
                    spec=decode_spec(task.spec),
                    length=task.length,
                    chunks=task.chunks,
                )
            )
        if excess:
            await self._store.run(operations.release(excess))
        return tuple(kept)

    def _reply(self, status: str, leases: tuple[Lease, ...]) -> LeaseReply:
        return LeaseReply(status=status, leases=leases, publication=self._board.publication)
