"""Leases of tasks: grant, wait for work, share between actors, take back a lost grant, reap.

A request is granted at most once: the grant is kept with the request's `seq`, and a resent copy
gets the same leases; if its broker has died, the next one has them from the store. An actor that is
silent, gone, or has sent a newer request gets nothing from an older one.

Every broker reaps, without a leader: the store's REAP is idempotent. Time in which heartbeats could
not arrive must not expire leases: after an outage of the broker or the store, or a stopped process,
every lease would expire at once. So each outage is followed by a grace period of one lease timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import structlog

from broker.protocol.codec import decode_spec
from broker.protocol.messages import Lease, LeaseReply, LeaseRequest
from buffer import operations
from buffer.operations.values import LeasedTask
from buffer.record.object_store import ObjectStore, is_reference
from buffer.store import AsyncStore
from configs.errors import RecordError, StoreError
from configs.settings import BrokerSettings, RunSettings
from configs.traces import trace_expired, trace_leased

from .liveness import Liveness, PeerSession, Recoveries
from .store_cache import StoreCache

UNSERVED = ("WAIT", "EMPTY")
HEADER_BYTES = 4096  # room for the rest of a reply beside chunks and specs
LEASE_BYTES = 64  # of one lease beside them
TICK_S = 0.1  # new work is noticed this soon
TRIES_PER_TICK = 16  # at most 160 calls a second, two per cent of what Redis does on one core
REAPS_PER_LEASE = 6  # at least: a pause between two is a third of one that counts as an outage
REAP_BATCH = 256  # leases returned in one call: a few milliseconds of Redis
SHARE_AFTER_S = 0.4  # without work, before others have to share theirs
SHARE_EVERY_S = 0.4  # if the last share brought nothing
SHARE_PAUSES = 20  # times the duration of the last share, if it brought leases: others wait as well
SHARE_STILL_MS = 5000  # without a token: a lease that grows is not shared
SLOWEST_TOKENS = 64  # in one progress_timeout_s, on average: half a token a second by default

READ_TOKENS_PER_S = 256  # of one episode: an engine may have to read a hundred before it makes any

log = structlog.get_logger()


def still_ms(settings: BrokerSettings, run: RunSettings) -> int:
    """Return how long a lease may bring no token, in milliseconds.

    An engine reads the prompt, and tokens that came with the lease, before it samples the first.
    """
    read_s = (run.max_prompt_tokens + run.max_completion_tokens) / READ_TOKENS_PER_S
    return int(1000 * max(settings.progress_timeout_s, read_s))


def longest_lease_ms(settings: BrokerSettings, max_completion_tokens: int) -> int:
    """Return how long a lease may last, in milliseconds: rare tokens cannot keep a task for days.

    Each token may take a share of the progress timeout, and the environment one whole timeout.
    """
    timeouts = 1 + max_completion_tokens / SLOWEST_TOKENS
    return int(1000 * timeouts * settings.progress_timeout_s)


class WaitQueue:
    """Waiting LEASE requests: first come, first served, a few at a time.

    The store cannot wake a broker when work becomes admissible, because that depends on the actor's
    policy version and on the grants of other brokers. So the first few requests try again at every
    tick, and each that is served lets the next one try at once. A request that tried goes to the
    end, so a request that cannot be served delays no other. A try costs one Lua call, and no call
    is made while the queue is empty.
    """

    def __init__(self) -> None:
        self._turns: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._turns)

    async def wait(self, timeout_s: float) -> None:
        """Wait at the end of the queue until `wake` reaches this call, or the time is over."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await asyncio.wait([turn], timeout=timeout_s)
        finally:
            if not turn.done():
                self._turns.remove(turn)

    def wake(self, count: int = TRIES_PER_TICK) -> None:
        """Let the first requests try again."""
        for _ in range(min(count, len(self._turns))):
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)


class GracePeriod:
    """Time after an outage in which no lease is reaped. No I/O; the clock is injected."""

    def __init__(self, *, grace_s: float, clock: Callable[[], float]) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._checked_at = clock()
        self._ends_at = clock() + grace_s

    def start(self) -> None:
        """Begin a grace period: heartbeats may have been lost."""
        self._ends_at = self._clock() + self._grace_s

    def is_over(self) -> bool:
        """Return whether heartbeats could arrive for long enough that expired leases count."""
        now = self._clock()
        if now - self._checked_at > self._grace_s / 2:  # this process was stopped meanwhile
            self.start()
        self._checked_at = now
        return now >= self._ends_at


class Leasing:
    """Grants leases to peers, shares them between holders, and takes expired ones back.

    `grant`, `wait`, `release_unsent` and `reap` raise StoreError if the store fails.
    """

    def __init__(
        self,
        store: AsyncStore,
        settings: BrokerSettings,
        peers: Liveness,
        cache: StoreCache,
        objects: ObjectStore | None = None,
    ) -> None:
        self._store = store
        self.objects = objects
        """Large records outside of Redis; None = there are none."""
        self._settings = settings
        self._peers = peers
        self._cache = cache
        self._ttl_ms = int(settings.lease_timeout_s * 1000)
        self._grace = GracePeriod(grace_s=settings.lease_timeout_s, clock=time.monotonic)
        self._is_closing = False
        self._shares_at = 0.0
        self.reap_every_s = min(settings.reap_every_s, settings.lease_timeout_s / REAPS_PER_LEASE)
        """Pause between two calls of `reap`."""
        self.queue = WaitQueue()
        """Woken by the server at every tick, and whenever leases were given back."""
        self.recoveries = Recoveries(peers)

    async def grant(self, peer: PeerSession, seq: int, request: LeaseRequest) -> LeaseReply | None:
        """Try once to serve a new request; None if a newer one has overtaken it.

        The reply is DONE for an actor that is drained, and WAIT for a suspended key or, unless a
        teacher asks, a full store.
        """
        if seq < peer.lease_seq:
            return None
        peer.lease_seq = seq
        peer.version = request.version
        return await self._try(peer, seq, request)

    async def wait(self, peer: PeerSession, seq: int, request: LeaseRequest) -> LeaseReply | None:
        """Try again whenever it is this request's turn, until the long poll is over.

        An actor that `takes_over` may get leases of another holder after `SHARE_AFTER_S`.

        Returns:
            The last reply, which may have no leases; None if a newer request has overtaken it.
        """
        began = time.monotonic()
        ends_at = began + self._settings.long_poll_s
        while True:
            left_s = ends_at - time.monotonic()
            if left_s > 0 and not self._is_closing:
                await self.queue.wait(left_s)
            if request.takes_over and time.monotonic() - began > SHARE_AFTER_S:
                await self._share(peer, seq, request)
            reply = await self._try(peer, seq, request)
            is_over = self._is_closing or time.monotonic() >= ends_at
            if reply is None or reply.status not in UNSERVED or is_over:
                return reply

    async def stop_granting(self, peer: PeerSession) -> None:
        """Grant a peer nothing more; return when the reply to its last grant is on its way.

        Otherwise a request that it has given up may be granted tasks that it releases as it leaves.
        """
        peer.is_draining = True
        async with peer.lease_lock:
            pass

    async def release_unsent(self, peer: PeerSession, reply: LeaseReply) -> None:
        """Release a grant whose reply could not be sent."""
        peer.granted = None
        tasks = [(lease.task_id, lease.fence) for lease in reply.leases]
        await self._store.run(operations.release(tasks, peer.tag))
        log.info("leases taken back: their actor is gone", count=len(tasks))

    async def reap(self) -> None:
        """Return expired leases to the store, except within a grace period."""
        self.recoveries.judge_moves()
        operation = operations.reap(
            max_attempts=self._settings.max_attempts,
            # In a grace period it takes nothing, and shows the store that a broker is alive.
            batch=REAP_BATCH if self._grace.is_over() else 0,
            every_ms=round(1e3 * self.reap_every_s),
        )
        try:
            ids = await self._store.run(operation)
        except StoreError:
            self.pause_reaping()
            raise
        self.recoveries.expired(ids)
        trace_expired(ids)
        if ids:
            log.info("expired leases returned", count=len(ids))

    def pause_reaping(self) -> None:
        """Begin a grace period: heartbeats may have been lost."""
        self._grace.start()

    def close(self) -> None:
        """Answer all waiting requests now."""
        self._is_closing = True
        self.queue.wake(len(self.queue))

    async def _try(self, peer: PeerSession, seq: int, request: LeaseRequest) -> LeaseReply | None:
        async with peer.lease_lock:
            if peer.granted is not None and peer.granted[0] == seq:
                return peer.granted[1]
            if self._is_overtaken(peer, seq):
                return None
            if peer.is_draining:
                return self._reply("DONE", ())
            if self._is_closed(peer):
                return self._reply("WAIT", ())
            began_ns = time.time_ns()
            answer = await self._store.run(
                operations.lease(
                    peer.hello.incarnation,
                    ttl_ms=self._ttl_ms,
                    n=request.n,
                    version=request.version,
                    key=peer.tag,
                    seq=seq,
                    abandoned=request.abandoned,
                    begun_only=request.begun_only,
                    teacher=peer.hello.teacher,
                )
            )
            if answer.status != "OK":
                return self._reply(answer.status, ())
            tasks = answer.tasks
            if peer.hello.teacher:
                tasks = await self._with_records(tasks, peer.tag)
            leases = await self._fit(tasks, peer.tag)
            if not leases:
                return self._reply("WAIT", ())
            reply = self._reply("OK", leases)
            peer.granted = (seq, reply)
            trace_leased(leases, actor=peer.hello.incarnation, began_ns=began_ns)
            self.recoveries.granted(peer, (lease.task_id for lease in leases))
            self.queue.wake(1)
            return reply

    def _is_overtaken(self, peer: PeerSession, seq: int) -> bool:
        return peer.lease_seq != seq or self._peers.is_suspect(peer)

    def _is_closed(self, peer: PeerSession) -> bool:
        # What teachers are given makes room: only scored episodes can be trained and deleted.
        is_full = self._cache.is_full and not peer.hello.teacher
        return is_full or self._cache.closed.has(peer.tag)

    async def _share(self, peer: PeerSession, seq: int, request: LeaseRequest) -> None:
        """Give an actor without work some leases of a holder that has more than an even share.

        The call looks at every lease, so calls may take a twentieth of the time together.
        """
        now = time.monotonic()
        if self._is_overtaken(peer, seq) or peer.is_draining or self._is_closed(peer):
            return
        if now < self._shares_at:
            return
        self._shares_at = now + SHARE_EVERY_S
        share = operations.share(
            peer.tag,
            request.version.lineage,
            request.n,
            still_ms=SHARE_STILL_MS,
            token_ms=1e3 * self._settings.progress_timeout_s / SLOWEST_TOKENS,
        )
        tasks = await self._store.run(share)
        if tasks:
            ended = time.monotonic()
            self._shares_at = min(self._shares_at, ended + SHARE_PAUSES * (ended - now))
            log.info("leases shared with a key that has none", key=peer.tag, count=len(tasks))

    async def _with_records(self, tasks: list[LeasedTask], key: str) -> list[LeasedTask]:
        """Replace references by the records that a teacher must score; fail those that are gone."""
        whole: list[LeasedTask] = []
        for task in tasks:
            [record] = task.chunks
            if self.objects is not None and is_reference(record):
                try:
                    record = await asyncio.to_thread(self.objects.get, task.task_id, record)
                except RecordError as error:
                    most = self._settings.max_attempts
                    lost = [(task.task_id, task.fence, "data", str(error))]
                    await self._store.run(operations.fail(key, max_attempts=most, failures=lost))
                    continue
            whole.append(task._replace(chunks=(record,)))
        return whole

    async def _fit(self, tasks: list[LeasedTask], key: str) -> tuple[Lease, ...]:
        """Keep the leases that fit into one reply, with their chunks, and release the rest.

        A task that would fit into no reply loses its chunks, and is charged an attempt.
        """
        left = most = self._settings.max_message_bytes - HEADER_BYTES
        kept: list[Lease] = []
        excess: list[tuple[int, int]] = []
        too_large: list[tuple[int, int]] = []
        for task in tasks:
            size = LEASE_BYTES + len(task.spec) + sum(8 + len(chunk) for chunk in task.chunks)
            if size > most:
                too_large.append((task.task_id, task.fence))
                continue
            left -= size
            if left < 0:
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
            await self._store.run(operations.release(excess, key))
        if too_large:
            log.warning(
                "tasks are too large for a message: their tokens are dropped", tasks=too_large
            )
            cut = operations.cut(too_large, key, max_attempts=self._settings.max_attempts)
            await self._store.run(cut)
        return tuple(kept)

    def _reply(self, status: str, leases: tuple[Lease, ...]) -> LeaseReply:
        return LeaseReply(status=status, leases=leases, publication=self._cache.publication)
