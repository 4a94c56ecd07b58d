"""Answers to actors: each message is checked, costs at most one call of the store, and is answered.

Nothing is acknowledged before the store has it. A message that is malformed, out of range or of
an unknown incarnation gets a Refusal and changes nothing; while the store cannot be reached, the
Refusal asks the actor to send again. No state but the table of peers; no sockets.

| code        | remedy |
| ----------- | ----------------------- |
| `hello`     | send HELLO first: the broker has restarted, or forgot a silent peer |
| `store`     | send the same again later: nothing was lost; also before the run has begun |
| `mismatch`  | start with the run's own settings; the text names what differs |
| `run`       | connect to this run's broker |
| `full`      | try again when an actor has left, or raise the limit that the text names |
| `busy`      | send the same again later: the peer has asked too much, or has another connection |
| `role`      | use a key of a role that may send this (`validation.py`) |
| `revoked`   | nothing: its key has been taken off the allow-list |
| `malformed` | nothing: a bug or an attack; the text says what is wrong |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from typing import Generic, TypeVar

from broker.protocol.codec import Envelope
from broker.protocol.conversation_messages import ListenRequest, SayRequest, WantRequest
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    FailRequest,
    Hello,
    LeaseRequest,
    Refusal,
    ReleaseRequest,
    SubmitRequest,
    TaskVerdict,
    Verdict,
    Verdicts,
    Welcome,
)
from buffer import operations
from buffer.operations.keys import EVAL_BASE
from buffer.operations.operation import SLICE, Operation
from buffer.operations.values import (
    LEFT,
    BeatLine,
    BeatVerdict,
    SayLine,
    SubmitLine,
    actor_name,
    holder_of,
)
from buffer.record.rules import EpisodeLimits
from buffer.store import AsyncStore
from configs.errors import RecordError, StoreError, StoreUnreachable, printable
from configs.settings import AgentSettings, BrokerSettings, BufferSettings, RunSettings
from configs.traces import tracing_stores
from configs.validation.store import max_partial_bytes

from .audit import Audit
from .conversations import Conversations
from .flow_control import FailureBudgets, hello_buckets
from .leasing import Leasing, longest_lease_ms, still_ms
from .liveness import Liveness, PeerSession
from .store_cache import StoreCache
from .validation import (
    HOST_REQUESTS,
    Versions,
    check_beats,
    check_hello,
    check_host,
    check_lease,
    check_says,
    check_submissions,
    refuse_misplaced,
    refuse_without_store,
)

# --------------------------------------------------------------------------------------------------
# Batching of store calls: rows that arrive while a call is under way are written together next.
#
# When the broker is idle, a request goes out at once and alone. Under load the batch grows by
# itself, and the cost of a call (the client's bookkeeping, a round trip, Redis' own) is shared:
# this cost was half of the broker's time for each episode. A request still gets its answers only
# after its rows are written.

Row = TypeVar("Row")
Answer = TypeVar("Answer")


class Batch(Generic[Row, Answer]):
    """Joins the rows of concurrent requests into calls of one operation."""

    def __init__(
        self, store: AsyncStore, operation: Callable[[list[Row]], Operation[list[Answer]]]
    ) -> None:
        self._store = store
        self._operation = operation
        self._waiting: list[tuple[Sequence[Row], asyncio.Future[list[Answer]]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def run(self, rows: Sequence[Row]) -> list[Answer]:
        """Write rows and return their answers, in order.

        Raises:
            StoreError: the call that these rows were part of failed.
        """
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting.append((rows, answers))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await answers

    async def _write(self) -> None:
        try:
            while self._waiting:
                await self._write_once(self._next_requests())
        finally:
            self._writing = None

    def _next_requests(self) -> list[tuple[Sequence[Row], asyncio.Future[list[Answer]]]]:
        """Remove and return the first requests that fit into one call, at least one."""
        count = total = 0
        for rows, _ in self._waiting:
            if count and total + len(rows) > SLICE:
                break
            total += len(rows)
            count += 1
        requests = self._waiting[:count]
        del self._waiting[:count]
        return requests

    async def _write_once(
        self, requests: list[tuple[Sequence[Row], asyncio.Future[list[Answer]]]]
    ) -> None:
        rows = [row for part, _ in requests for row in part]
        try:
            answers = await self._store.run(self._operation(rows))
        except Exception as error:  # noqa: BLE001 - belongs to the requests, whatever it is
            for _, waiting in requests:
                if not waiting.done():
                    waiting.set_exception(error)
            return
        start = 0
        for part, waiting in requests:
            if not waiting.done():
                waiting.set_result(answers[start : start + len(part)])
            start += len(part)


# --------------------------------------------------------------------------------------------------
# Answers to actors: each message is checked, costs at most one call of the store, and is answered.

_VERDICTS = {verdict.value: verdict for verdict in Verdict} | {"TAKEN": Verdict.OUTDATED}
REPORTED_AT_ONCE = 64  # actors: the store is busy for a millisecond, not for a whole fleet
TAKEN = "its leases brought too many or too few tokens, or tokens of weights older than its own"
OBJECT_DEADLINE_S = 60.0  # for a record of at most 16 MiB; the actor sends it again


class Service:
    """Answers the requests of actors whose permission has been checked."""

    def __init__(
        self,
        store: AsyncStore,
        *,
        run: RunSettings,
        broker: BrokerSettings,
        buffer: BufferSettings,
        agents: AgentSettings,
        teachers: Set[str] = frozenset({""}),
        peers: Liveness,
        cache: StoreCache,
        leasing: Leasing,
        audit: Audit,
    ) -> None:
        self._store = store
        self._run, self._episodes, self._teachers = run.name, run, teachers
        self._limits = EpisodeLimits.for_run(run, vocabulary=None)
        self._settings = broker
        self._max_episode_bytes = buffer.max_episode_bytes
        limits = {
            "ttl_ms": int(broker.lease_timeout_s * 1000),
            "progress_timeout_ms": still_ms(broker, run),
            "max_attempts": broker.max_attempts,
            "max_bytes": max_partial_bytes(run, buffer),
            "longest_ms": longest_lease_ms(broker, run.max_completion_tokens),
        }
        self._beats: Batch[BeatLine, BeatVerdict] = Batch(
            store, lambda lines: operations.beat(lines=lines, **limits)
        )
        self._says: Batch[SayLine, BeatVerdict] = Batch(
            store, lambda lines: operations.say_replies(lines, **limits)
        )
        self._submits: Batch[SubmitLine, str] = Batch(store, operations.submit)
        self.conversations = Conversations(
            store, broker, cache, max_bytes=buffer.max_episode_bytes, agent_s=agents.timeout_s
        )
        """Mailboxes, whose long polls the server wakes at every tick."""
        self._objects = leasing.objects
        self._inline_bytes = buffer.inline_bytes
        self._peers = peers
        self._cache = cache
        self._leasing = leasing
        self._audit = audit
        self._key_budgets = FailureBudgets(time.monotonic)
        self._holder_budgets = FailureBudgets(time.monotonic)
        self._key_hellos = hello_buckets(broker.max_actors_per_key)
        self._holder_hellos = hello_buckets(
            max(broker.max_actors_per_key, broker.max_actors_per_enrolment)
        )

    async def answer(self, envelope: Envelope, key: str, tag: str, route: bytes) -> object | None:
        """Carry out a request.

        Args:
            envelope: The decoded message.
            key: Public key that the connection has proved to hold.
            tag: Tag of that key in the store.
            route: The connection.

        Returns:
            The reply; None if a newer request has overtaken this one.
        """
        try:
            return await self._answer(envelope, key, tag, route)
        except RecordError as error:
            return Refusal("malformed", str(error))
        except StoreError as error:
            self._leasing.pause_reaping()
            return refuse_without_store(error)

    async def report(self) -> None:
        """Write to the store the actors that were heard since the last report.

        Raises:
            StoreError: The store cannot be written.
        """
        heard = [peer for peer in self._peers if peer.is_unreported]
        for start in range(0, len(heard), REPORTED_AT_ONCE):
            portion = heard[start : start + REPORTED_AT_ONCE]
            seen = {actor_name(p.hello.incarnation, p.tag): p.figures() for p in portion}
            for peer in portion:
                peer.is_unreported = False
            await self._store.run(operations.actor_seen(seen))

    async def _answer(self, envelope: Envelope, key: str, tag: str, route: bytes) -> object | None:
        message = envelope.message
        if refusal := refuse_misplaced(self._episodes, envelope.run, message):
            return refusal
        if isinstance(message, Hello):
            if not (
                self._key_hellos.take_token(tag) and self._holder_hellos.take_token(holder_of(tag))
            ):
                return Refusal("busy", "this key has said HELLO too often; send it again later")
            check_hello(message, incarnation=envelope.inc, teachers=self._teachers)
            return await self._hello(message, key, tag, route)
        if isinstance(message, HOST_REQUESTS):
            check_host(envelope.inc)
            return await self.conversations.answer_host(message, envelope.inc, tag)
        peer = self._peers.observe(envelope.inc, key, route)
        if isinstance(message, Bye) and (peer or self._peers.get(envelope.inc, key) is None):
            self._peers.end_session(envelope.inc, key)
            if peer is not None:
                self._audit.record("actor left", actor=envelope.inc, actors=len(self._peers))
                left = {actor_name(envelope.inc, tag): peer.figures() | {LEFT: "1"}}
                await self._store.run(operations.actor_seen(left))
            return message
        if peer is None:
            return Refusal("hello", "this broker does not know the incarnation; say HELLO first")
        if isinstance(message, LeaseRequest):
            check_lease(message, capacity=peer.hello.capacity)
            return await self._leasing.grant(peer, envelope.seq, message)
        if isinstance(message, WantRequest | ListenRequest):
            return await self.conversations.answer_actor(message, envelope.inc, tag)
        return await self._write(message, peer)

    async def _hello(self, hello: Hello, key: str, tag: str, route: bytes) -> Welcome | Refusal:
        stats = await self._store.run(operations.stats())
        if stats.state == "NONE":
            return Refusal(
                "store", "the run has not begun; start its learner, or wait until it has"
            )
        for name in sorted(stats.hashes.keys() | hello.hashes.keys()):
            wanted, got = stats.hashes.get(name, "none"), hello.hashes.get(name, "none")
            if wanted != got:
                return Refusal(
                    "mismatch",
                    f"the hash of {name} must be the run's, {wanted:.12}, got {got:.12}; start "
                    "this actor with the run's config.yaml, environment, data and rewards, with "
                    "its release of Nyala and, under run.deterministic, the learner's kind of "
                    "processor and releases of libraries",
                )
        if self._peers.is_elsewhere(hello.incarnation, key, route):
            return Refusal("busy", "this incarnation has another connection; send again later")
        if self._peers.exceeded_limit(hello.incarnation, key, tag) is not None:
            await self._replace(self._peers.gone_of(key))
        limit = self._peers.exceeded_limit(hello.incarnation, key, tag)
        if limit is not None:
            text = f"actors must be at most {limit}, got one more; raise it, or stop some"
            own_key = ", or give each actor a key of its own: `nyala keys add NAME`"
            return Refusal("full", text + (own_key if "per_key" in limit else ""))
        self._limits = EpisodeLimits.for_run(self._episodes, vocabulary=stats.vocabulary)
        self._peers.admit(hello, key, tag, route)
        self._audit.record(
            "actor joined", actor=hello.incarnation, host=hello.host, actors=len(self._peers)
        )
        return Welcome(
            run_id=self._run,
            lease_timeout_s=self._settings.lease_timeout_s,
            publication=self._cache.publication,
            long_poll_s=self._settings.long_poll_s,
            max_message_bytes=self._settings.max_message_bytes,
            brokers=self._cache.brokers,
        )

    async def _replace(self, gone: list[PeerSession]) -> None:
        """Forget actors that have ended, and release their leases before these expire."""
        most = self._settings.max_attempts
        for peer in gone:
            name = peer.hello.incarnation
            self._peers.forget(name, peer.key)
            self._audit.record("actor replaced", actor=name, actors=len(self._peers))
            release = operations.release_dead_actor(name, peer.tag, max_attempts=most)
            await self._store.run(release)

    async def _write(self, message: object, peer: PeerSession) -> object:
        tag = peer.tag
        match message:
            case BeatRequest():
                return await self._beat(message, peer)
            case SayRequest():
                return await self._say(message, peer)
            case SubmitRequest():
                versions = check_submissions(
                    message,
                    max_bytes=self._max_episode_bytes,
                    limits=self._limits,
                    teachers=self._teachers,
                    is_teacher=bool(peer.hello.teacher),
                )
                if refusal := await self._cache.refuse_unpublished(versions.newest):
                    return refusal
                rows = [
                    SubmitLine(s.task_id, s.fence, s.record, tag, oldest, s.teacher)
                    for s, oldest in zip(message.submissions, versions.oldest, strict=True)
                ]
                if self._objects is not None:
                    rows = [await self._to_object_store(row) for row in rows]
                verdicts = await tracing_stores(rows, self._submits.run(rows))
                for _, budgets in self._budgets_of(peer):
                    budgets.count(tag, good=verdicts.count("OK"))
                await self._count_failures(peer, verdicts.count("TAKEN"), TAKEN)
                return self._verdicts([row.task_id for row in rows], verdicts)
            case ReleaseRequest():
                if not message.tasks:  # precedes BYE
                    await self._leasing.stop_granting(peer)
                verdicts = await self._store.run(operations.release(message.tasks, tag))
                self._leasing.queue.wake()  # a request may wait for these tasks
                return self._verdicts([task_id for task_id, _ in message.tasks], verdicts)
            case FailRequest():
                failures = [
                    (f.task_id, f.fence, f.kind, printable(f.reason)) for f in message.failures
                ]
                fail = operations.fail(
                    tag,
                    max_attempts=self._settings.max_attempts,
                    max_data_failures=self._settings.max_data_failures,
                    failures=failures,
                )
                verdicts = await self._store.run(fail)
                last = f"{failures[-1][3]:.200}" if failures else ""
                await self._count_failures(peer, verdicts.count("OK"), last)
                return self._verdicts([row[0] for row in failures], verdicts)
            case _:
                raise RecordError(
                    f"message must be a request of an actor, got {type(message).__name__}; use the "
                    "same release of Nyala on all machines"
                )

    async def _to_object_store(self, row: SubmitLine) -> SubmitLine:
        """Put a large record into the object store first; return the row for Redis.

        Raises:
            StoreUnreachable: The object store refused, or did not answer in time.
        """
        if len(row.record) <= self._inline_bytes or row.task_id >= EVAL_BASE:
            return row
        assert self._objects is not None
        try:
            async with asyncio.timeout(OBJECT_DEADLINE_S):
                record = await asyncio.to_thread(self._objects.put_record, row.task_id, row.record)
        except OSError as error:  # a TimeoutError is one
            raise StoreUnreachable(
                f"the object store must accept records, got {error!r}; see that the broker reaches "
                "buffer.object_store and may write there"
            ) from error
        return row._replace(record=record)

    async def _beat(self, message: BeatRequest, peer: PeerSession) -> Verdicts | Refusal:
        versions = check_beats(message, max_bytes=self._max_episode_bytes, limits=self._limits)
        if refusal := await self._cache.refuse_unpublished(versions.newest):
            return refusal
        peer.version, peer.stats = message.version, message.stats
        lines = _beat_lines(message.beats, versions, peer)
        verdicts = await self._beat_verdicts(peer, lines, await self._beats.run(lines))
        return Verdicts(verdicts, self._cache.publication, self._cache.brokers)

    async def _say(self, message: SayRequest, peer: PeerSession) -> Verdicts | Refusal:
        beats = tuple(say.beat for say in message.says)
        check_says(message, max_bytes=self.conversations.max_part_bytes)
        versions = check_beats(
            BeatRequest(beats, message.version),
            max_bytes=self._max_episode_bytes,
            limits=self._limits,
        )
        if refusal := await self._cache.refuse_unpublished(versions.newest):
            return refusal
        peer.version = message.version
        lines = _beat_lines(beats, versions, peer)
        answers = await self._says.run(
            [
                SayLine(line, say.ticket, say.number, say.turn_end, say.reply)
                for line, say in zip(lines, message.says, strict=True)
            ]
        )
        verdicts = await self._beat_verdicts(peer, lines, answers)
        self.conversations.said(verdicts)
        return Verdicts(verdicts, self._cache.publication)

    async def _beat_verdicts(
        self, peer: PeerSession, lines: list[BeatLine], answers: list[BeatVerdict]
    ) -> tuple[TaskVerdict, ...]:
        await self._count_failures(peer, sum(a.verdict == "TAKEN" for a in answers), TAKEN)
        return tuple(
            TaskVerdict(line.task_id, _VERDICTS[answer.verdict], answer.length)
            for line, answer in zip(lines, answers, strict=True)
        )

    async def _count_failures(self, peer: PeerSession, count: int, last: str) -> None:
        """Suspend a key or holder that fails where others do not; briefly, if it is uncertain."""
        if not count:
            return
        for _, budgets in self._budgets_of(peer):
            budgets.count(peer.tag, bad=count)
        for name, budgets in self._budgets_of(peer):
            excess = budgets.excess(name)
            if excess is not None and not self._peers.is_alone(name):
                why = f"{excess.text}; {peer.hello.incarnation} on {peer.hello.host}: {last}"
                suspend = operations.suspend(name, why, is_brief=not excess.is_certain)
                tasks = await self._store.run(suspend)
                for judged, counts in self._budgets_of(peer) if excess.is_certain else ():
                    if judged == name:  # a lone key is its own holder
                        counts.forget(name)
                self._audit.record("key suspended", key=name, why=why, leases=len(tasks))
                await self._cache.refresh_closed()
                self._leasing.queue.wake()
                return

    def _budgets_of(self, peer: PeerSession) -> tuple[tuple[str, FailureBudgets], ...]:
        """Return the budgets of a peer's failures: that of its key, then that of its holder."""
        return (peer.tag, self._key_budgets), (holder_of(peer.tag), self._holder_budgets)

    def _verdicts(self, task_ids: list[int], verdicts: list[str]) -> Verdicts:
        lines = tuple(
            TaskVerdict(task_id, _VERDICTS[verdict])
            for task_id, verdict in zip(task_ids, verdicts, strict=True)
        )
        return Verdicts(lines, self._cache.publication)


def _beat_lines(beats: Sequence[Beat], versions: Versions, peer: PeerSession) -> list[BeatLine]:
    return [
        BeatLine(b.task_id, b.fence, b.offset, b.num_tokens, b.chunk, peer.tag, oldest, *fences)
        for b, oldest, fences in zip(beats, versions.oldest, versions.fences, strict=True)
    ]
