"""Client of the broker: calls sent again until answered, and release of leases granted too late.

Used by actors and hosts of agents, and by `nyala top` for a run elsewhere. Each request waits for
the reply with its own `seq`, is resent with growing pauses, and ends at its deadline. Every request
is idempotent (fences, and a grant is remembered by its `seq`), so a resent one does no harm. A
broker that restarted asks for HELLO, and the client repeats it by itself.

Example:
    client = BrokerClient(endpoint, server_key=..., keys=..., run="demo", incarnation="actor-1")
    welcome = await client.hello(Hello(...))
    reply = await client.lease(LeaseRequest(n=8, version=version))
    await client.bye()
    await client.close()
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Sequence, Set
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, TypeVar

import structlog
import zmq
from msgspec.structs import replace

from broker.protocol.codec import decode, encode, header_of
from broker.protocol.conversation_messages import (
    CallRequest,
    CallsReply,
    EndRequest,
    ListenRequest,
    RepliesReply,
    RepliesRequest,
    SayRequest,
    TakeReply,
    TakeRequest,
    WantRequest,
)
from broker.protocol.messages import (
    MAX_ABANDONED,
    BeatRequest,
    Bye,
    DrainRequest,
    Enrol,
    FailRequest,
    Hello,
    LeaseReply,
    LeaseRequest,
    Receipt,
    Refusal,
    ReleaseRequest,
    RevokeRequest,
    StatusReply,
    StatusRequest,
    SubmitRequest,
    Verdicts,
    Welcome,
)
from broker.transport.enrolled import broker_public_keys
from broker.transport.keys import KeyPair, load_public
from configs.errors import DeadlineError, RecordError, RefusedError, SettingsError
from configs.settings import Settings

from .connection import Connection, ReadKeys

# --------------------------------------------------------------------------------------------------
# Leases granted to a call that had given up: released at once instead of left to expire.
#
# LEASE call --cancelled, or at its deadline--> abandoned --its reply arrives--> released
#
# A reply that was lost with its broker never arrives: the next LEASE names the calls that still
# wait, and the store takes back the leases that they were granted.

RELEASE_DEADLINE_S = 5.0  # after that the leases are left to expire

log = structlog.get_logger()


class Release(Protocol):
    """The call that gives leases back: `BrokerClient.release`."""

    async def __call__(self, request: ReleaseRequest, *, deadline_s: float) -> Verdicts: ...


class AbandonedLeases:
    """LEASE calls of one client whose callers have given up."""

    def __init__(self, release: Release, *, max_calls: int) -> None:
        """Begin without a call.

        Args:
            release: Gives leases back.
            max_calls: Calls to remember; beyond that the oldest are left to expire.
        """
        self._release = release
        self._calls: deque[int] = deque(maxlen=max_calls)
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def calls(self) -> tuple[int, ...]:
        """Numbers of the calls without an answer, which may have been lost."""
        return tuple(self._calls)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, seq: int, answer: asyncio.Future[object | None] | None) -> None:
        """Add a call that ends; its answer may have arrived already, unread."""
        reply = answer.result() if answer and answer.done() and not answer.cancelled() else None
        if isinstance(reply, LeaseReply):
            self._start_release(reply)
        else:  # an earlier copy may have been granted leases, even if this one was refused
            self._calls.append(seq)

    def on_reply(self, seq: int, message: object) -> None:
        """Release the leases of a reply to an abandoned call; other replies are ignored."""
        if isinstance(message, LeaseReply) and seq in self._calls:
            self._calls.remove(seq)  # a second copy must not be released as well
            self._start_release(message)

    async def wait_released(self, timeout_s: float) -> None:
        """Wait until the leases of the replies so far are released."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel releases that are under way."""
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    def _start_release(self, reply: LeaseReply) -> None:
        if reply.leases:
            task = asyncio.create_task(self._release_all(reply))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release_all(self, reply: LeaseReply) -> None:
        tasks = tuple((lease.task_id, lease.fence) for lease in reply.leases)
        try:
            await self._release(ReleaseRequest(tasks), deadline_s=RELEASE_DEADLINE_S)
        except (DeadlineError, RefusedError) as error:
            log.warning("unused leases will expire", count=len(tasks), reason=str(error))


# --------------------------------------------------------------------------------------------------
# Long polls of conversations: the broker reads all of them now and then, and in between only those
# that have changed since the last answer.

READ_ALL_S = 5.0  # what ends a conversation without a change is found by then
READS_PER_TICKET = 4  # each of which renews it: a lost request or answer costs none


class KnownChanges:
    """Changes of conversations that one kind of long poll has heard of."""

    def __init__(self) -> None:
        self._lines: Set[tuple[int, int]] = frozenset()
        self._since = ""
        self._read_at = -math.inf

    def since(self, lines: Set[tuple[int, int]], wait_s: float, timeout_s: float) -> str:
        """Return the newest change that is known of all these conversations; empty = read all.

        Args:
            lines: Tasks, with their fences or tickets.
            wait_s: Time that the request may wait; one that does not wait reads all.
            timeout_s: Time after which a ticket expires.
        """
        read_all_s = min(READ_ALL_S, timeout_s / READS_PER_TICKET)
        is_old = time.monotonic() - self._read_at >= read_all_s
        return "" if is_old or wait_s <= 0 or not lines <= self._lines else self._since

    def note_answer(
        self, lines: Set[tuple[int, int]], since: str, *, asked_at: float | None
    ) -> None:
        """Note the answer to a request.

        Args:
            lines: Tasks, with their fences or tickets.
            since: Newest change that the answer has.
            asked_at: When all conversations were asked for; None = only those that have changed.
        """
        self._lines, self._since = lines, since
        if asked_at is not None:
            self._read_at = asked_at


# --------------------------------------------------------------------------------------------------
# Client of the broker: calls that are sent again until they are answered.

MAX_IN_FLIGHT = MAX_ABANDONED  # half the send queue: a call and its copy always fit
FIRST_WAIT_S = 0.2  # a reply takes milliseconds; after this it was lost or the broker is busy
LAST_WAIT_S = 5.0
UNSENT_WAIT_S = 0.05  # without a connection a send fails at once and costs nothing to repeat
DEFAULT_DEADLINE_S = 60.0
PROMPT = (Hello, BeatRequest, Bye, ListenRequest, TakeRequest, RepliesRequest)
"""Calls that wait for no other call, because there is one of each at a time."""

Reply = TypeVar("Reply")
News = TypeVar("News", CallsReply, RepliesReply)


class BrokerClient:
    """Calls the run's broker for one incarnation, from one event loop.

    Every call raises DeadlineError if it has no answer within its `deadline_s`, RefusedError if the
    broker refuses it or the key for good, and RecordError if its message is longer than
    `broker.max_message_bytes`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        server_key: bytes,
        keys: KeyPair,
        run: str,
        incarnation: str,
        other_endpoints: Sequence[str] = (),
        read_server_keys: ReadKeys | None = None,
        max_message_bytes: int = 32 * 2**20,
    ) -> None:
        """Connect in the background.

        Args:
            endpoint: `tcp://host:port` of the broker.
            server_key: The broker's public key, z85.
            keys: This actor's own key pair.
            run: Name of the run.
            incarnation: This life of the actor; a new one for every start.
            other_endpoints: More brokers of the run; later ones are added by `learn`.
            read_server_keys: Reads the public keys that a broker may have; None = `server_key`.
            max_message_bytes: Largest message, until the broker's WELCOME names its own limit.

        Raises:
            SettingsError: The brokers' public keys cannot be read.
        """
        self._run, self._incarnation = run, incarnation
        self._max_message_bytes = max_message_bytes
        self._long_poll_s, self._lease_timeout_s = 0.0, math.inf
        self._refusal_text: str | None = None
        self._is_closed = False
        self._connection = Connection(
            (endpoint, *other_endpoints),
            server_keys=read_server_keys or (lambda: [server_key]),
            keys=keys,
            incarnation=incarnation,
            max_message_bytes=max_message_bytes,
            on_cut=lambda: self._end_tries(None),
            on_refused=self._on_key_refused,
        )
        self.learn = self._connection.learn
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[object | None]] = {}
        self._known_calls, self._known_replies = KnownChanges(), KnownChanges()
        self._abandoned = AbandonedLeases(self.release, max_calls=MAX_IN_FLIGHT)
        self._credit = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._registration: Hello | None = None
        self._num_hellos = 0
        self._hello_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def hello(self, hello: Hello, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Welcome:
        """Register this incarnation; repeated by itself whenever a broker does not know it."""
        welcome = await self._call(hello, Welcome, deadline_s)
        self._registration, self._num_hellos = hello, self._num_hellos + 1
        self._long_poll_s, self._lease_timeout_s = welcome.long_poll_s, welcome.lease_timeout_s
        self._max_message_bytes = welcome.max_message_bytes
        self.learn(welcome.brokers)
        return welcome

    async def lease(
        self, request: LeaseRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> LeaseReply:
        """Ask for work; the answer may take as long as the broker's long poll."""
        request = replace(request, abandoned=self._abandoned.calls)
        return await self._call(request, LeaseReply, deadline_s, self._long_poll_s)

    async def beat(
        self, request: BeatRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Verdicts:
        """Renew leases and store chunks of unfinished episodes."""
        verdicts = await self._call(request, Verdicts, deadline_s)
        self.learn(verdicts.brokers)
        return verdicts

    async def submit(
        self, request: SubmitRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Verdicts:
        """Hand in finished episodes; returns once the store has them."""
        return await self._call(request, Verdicts, deadline_s)

    async def release(
        self, request: ReleaseRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Verdicts:
        """Give leases back to the store."""
        return await self._call(request, Verdicts, deadline_s)

    async def fail(
        self, request: FailRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Verdicts:
        """Report episodes that could not be made."""
        return await self._call(request, Verdicts, deadline_s)

    async def want(
        self, request: WantRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Verdicts:
        """Have leased tasks wait for agents, before their first token."""
        return await self._call(request, Verdicts, deadline_s)

    async def listen(
        self, request: ListenRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> CallsReply:
        """Wait for calls of agents, at most `wait_s`."""
        lines = {(line.task_id, line.fence) for line in request.tasks}
        return await self._poll(request, CallsReply, lines, self._known_calls, deadline_s)

    async def say(self, request: SayRequest, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Verdicts:
        """Answer agents; returns once the store has replies and tokens, or neither."""
        return await self._call(request, Verdicts, deadline_s)

    async def take(
        self, request: TakeRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> TakeReply:
        """Ask for conversations, as a host of agents; needs no HELLO, as all that a host asks."""
        reply = await self._call(request, TakeReply, deadline_s, request.wait_s)
        self._lease_timeout_s = reply.ticket_timeout_s
        return reply

    async def call(
        self, request: CallRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Verdicts:
        """Pass calls of agents on; returns once the store has them."""
        return await self._call(request, Verdicts, deadline_s)

    async def hear(
        self, request: RepliesRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> RepliesReply:
        """Keep tickets, and wait for replies, at most `wait_s`."""
        lines = {(line.task_id, line.ticket) for line in request.conversations}
        return await self._poll(request, RepliesReply, lines, self._known_replies, deadline_s)

    async def end(self, request: EndRequest, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Verdicts:
        """Report rewards and ends of conversations."""
        return await self._call(request, Verdicts, deadline_s)

    async def status(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StatusReply:
        """Read the status of the run, as an observer or operator; needs no HELLO."""
        return await self._call(StatusRequest(), StatusReply, deadline_s)

    async def order(
        self, order: RevokeRequest | DrainRequest | Enrol, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Receipt:
        """Revoke a key or drain an actor, as an operator, or enrol; needs no HELLO."""
        return await self._call(order, Receipt, deadline_s)

    async def bye(self, *, has_failed: bool = False, deadline_s: float = 2.0) -> None:
        """Give back leases that were granted late, and report the end of this incarnation.

        Takes up to three times `deadline_s`. Raises no error without an answer, because the broker
        notices the end by itself. A failed incarnation is not reported, so that it counts as dead
        and not as left.
        """
        try:
            if self._abandoned:  # the answer comes after all leases that were granted to them
                await self.release(ReleaseRequest(()), deadline_s=deadline_s)
            await self._abandoned.wait_released(deadline_s)
            if not has_failed:
                await self._call(Bye(), Bye, deadline_s)
        except (DeadlineError, RefusedError) as error:
            log.info("bye was not answered", reason=str(error))

    async def until_gone(self, after_s: float) -> None:
        """Return once `after_s` seconds have passed without a connection, counted from now on."""
        await self._connection.until_cut(after_s)

    async def close(self) -> None:
        """Drop the connection; calls that still wait are cancelled, later ones are refused."""
        self._is_closed = True
        await self._abandoned.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiting in self._pending.values():
            waiting.cancel()
        self._connection.close()

    async def _poll(
        self,
        request: ListenRequest | RepliesRequest,
        kind: type[News],
        lines: Set[tuple[int, int]],
        changes: KnownChanges,
        deadline_s: float,
    ) -> News:
        """Ask for what is new in conversations since the last answer of this kind."""
        since = changes.since(lines, request.wait_s, self._lease_timeout_s)
        asked_at = None if since else time.monotonic()
        request = replace(request, since=since)
        reply = await self._call(request, kind, deadline_s, request.wait_s)
        changes.note_answer(lines, reply.since, asked_at=asked_at)
        return reply

    async def _call(
        self, message: object, kind: type[Reply], deadline_s: float, broker_wait_s: float = 0.0
    ) -> Reply:
        """Send until answered. `broker_wait_s` is the time that the broker itself may take."""
        seq = next(self._numbers)
        frame = encode(message, run=self._run, incarnation=self._incarnation, seq=seq)
        if len(frame) > self._max_message_bytes:
            raise RecordError(
                f"a message must be at most broker.max_message_bytes = {self._max_message_bytes}, "
                f"got {len(frame)} bytes; raise it on all machines, or lower "
                "run.max_completion_tokens"
            )
        try:
            async with asyncio.timeout(deadline_s), self._limit_in_flight(message):
                return await self._until_answered(seq, frame, kind, broker_wait_s)
        except TimeoutError:
            raise DeadlineError(
                f"{type(message).__name__} must be answered within {deadline_s:g} s, got no answer "
                f"from {self._connection.description}; check that the broker runs, that "
                "broker.endpoint is its address and can be reached from here, and that broker.pub "
                "is its key, or see its log"
            ) from None

    def _limit_in_flight(self, message: object) -> AbstractAsyncContextManager[None]:
        """Bound the calls under way, except for those in `PROMPT`."""
        return nullcontext() if isinstance(message, PROMPT) else self._credit

    async def _until_answered(
        self, seq: int, frame: bytes, kind: type[Reply], broker_wait_s: float
    ) -> Reply:
        pause, asked_at = FIRST_WAIT_S, time.monotonic()
        # Its copy renews a grant whose reply was lost, or tickets, and must not come too late.
        is_capped = kind is LeaseReply or kind is RepliesReply
        cap_s = self._lease_timeout_s / 2 if is_capped else math.inf
        try:
            while True:
                reply = await self._send_once(
                    seq, frame, broker_wait_s + _jitter(pause), cap_s, asked_at
                )
                if isinstance(reply, kind):
                    if isinstance(reply, LeaseReply) and not reply.leases and pause > FIRST_WAIT_S:
                        self._abandoned.add(seq, None)  # a lost answer to a copy may have had some
                    return reply
                if isinstance(reply, Refusal):
                    await self._handle_refusal(reply, kind, pause)
                elif reply is not None:
                    raise RefusedError(
                        f"the broker's reply must be {kind.__name__}, got {type(reply).__name__}; "
                        "use the same release of Nyala on all machines"
                    )
                else:
                    self._connection.switch_if_silent(asked_at, broker_wait_s)
                pause = min(2 * pause, LAST_WAIT_S)
        except asyncio.CancelledError:  # by the caller, or at the deadline
            if kind is LeaseReply:
                self._abandoned.add(seq, self._pending.get(seq))
            raise
        finally:
            self._pending.pop(seq, None)

    async def _send_once(
        self, seq: int, frame: bytes, wait_s: float, cap_s: float, asked_at: float
    ) -> object | None:
        """Send once and wait for the reply; None if there is none yet."""
        if self._is_closed or self._refusal_text is not None:
            raise RefusedError(self._refusal_text or "the client is closed; make another")
        self._start_receiving()
        answer = self._pending[seq] = asyncio.get_running_loop().create_future()
        while not answer.done():
            try:
                await self._connection.send(frame)
                break
            except zmq.Again:
                self._connection.switch_if_silent(asked_at, 0.0)
                await asyncio.wait([answer], timeout=UNSENT_WAIT_S)
        ends_at = time.monotonic() + min(wait_s + LAST_WAIT_S, cap_s)
        while not answer.done():
            await asyncio.wait([answer], timeout=min(wait_s, ends_at - time.monotonic()))
            now = time.monotonic()
            # A broker that still answers others is busy: a copy would only lengthen its queue.
            if now - self._connection.received_at > wait_s or now >= ends_at:
                break
        return answer.result() if answer.done() else None

    async def _handle_refusal(self, refusal: Refusal, kind: type, pause_s: float) -> None:
        """Return when the request may be sent again, or raise."""
        if refusal.code in {"store", "busy"}:
            await asyncio.sleep(_jitter(max(pause_s, min(refusal.retry_after_s, LAST_WAIT_S))))
        elif refusal.code == "hello" and kind is not Welcome and self._registration is not None:
            await self._repeat_hello(self._registration)
        else:
            raise RefusedError(f"{refusal.text} (refused as {refusal.code})", code=refusal.code)

    async def _repeat_hello(self, hello: Hello) -> None:
        """Send HELLO once for all the calls that a restarted broker has refused."""
        seen = self._num_hellos
        async with self._hello_lock:
            if self._num_hellos == seen:
                log.info("sending HELLO again", endpoint=self._connection.endpoint)
                await self.hello(hello)

    def _start_receiving(self) -> None:
        if not self._tasks:
            for work in (self._receive(), self._connection.watch()):
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _receive(self) -> None:
        """Pass every reply to the call that waits for it."""
        while True:
            frame = await self._connection.receive()
            try:
                envelope = decode(frame, max_bytes=self._max_message_bytes)
                seq, message = envelope.seq, envelope.message
            except RecordError as error:
                seq = header_of(frame).seq
                message = Refusal(code="reply", text=str(error))
            answer = self._pending.get(seq)
            if answer is not None and not answer.done():
                answer.set_result(message)
            else:
                self._abandoned.on_reply(seq, message)

    def _on_key_refused(self, text: str | None) -> None:
        self._refusal_text = text
        if text is not None:
            self._end_tries(Refusal(code="key", text=text))

    def _end_tries(self, result: Refusal | None) -> None:
        """End the current try of every call."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_result(result)


def client_of(settings: Settings, keys: KeyPair, incarnation: str) -> BrokerClient:
    """Make a client of a run's brokers.

    Args:
        settings: Settings of the run.
        keys: The client's own key pair.
        incarnation: This life of the process.

    Raises:
        SettingsError: The endpoint or the broker's public key is missing.
    """
    check_endpoints(settings)
    folder = settings.keys_folder
    return BrokerClient(
        settings.broker.endpoint,
        server_key=load_public(folder, "broker"),
        other_endpoints=settings.broker.other_endpoints,
        read_server_keys=lambda: broker_public_keys(folder),
        keys=keys,
        run=settings.run.name,
        incarnation=incarnation,
        max_message_bytes=settings.broker.max_message_bytes,
    )


def check_endpoints(settings: Settings) -> None:
    """Refuse port 0, with which a run's settings leave the choice to `nyala up`.

    Raises:
        SettingsError: An endpoint has port 0.
    """
    if settings.broker.endpoint.endswith(":0"):
        raise SettingsError(
            f"broker.endpoint must have the port at which the run's broker listens, got "
            f"{settings.broker.endpoint}; give the folder of the run or its own config.yaml, or "
            f"--set broker.endpoint=tcp://HOST:PORT (docs/fleet.md)"
        )
    for endpoint in settings.broker.other_endpoints:
        if endpoint.endswith(":0"):
            raise SettingsError(
                f"broker.other_endpoints must have the ports at which brokers of the run listen, "
                f"got {endpoint}; write the port of that broker in place of 0 (docs/fleet.md)"
            )


def _jitter(pause_s: float) -> float:
    return pause_s * random.uniform(0.5, 1.5)  # or a fleet would come back in step
