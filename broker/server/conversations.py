"""Conversations of live agents: their mailboxes in the store, and long polls for what is new there.

Hosts take conversations, call and hear; actors want agents, listen and say. A long poll is woken
when what it waits for passes through this broker, and by the tick for what passed through another
one: the store numbers all changes. An answer names the newest change that it has, the next request
names it again, and only what has changed since is read. Each peer has one long poll of a kind; a
newer one ends it. No state but the requests that wait, and a log of changes.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Generic, NamedTuple, TypeVar

import structlog

from broker.protocol.codec import decode_reward, decode_spec, encode_reward
from broker.protocol.conversation_messages import (
    CallRequest,
    Calls,
    CallsReply,
    EndRequest,
    Hear,
    Listen,
    ListenRequest,
    Replies,
    RepliesReply,
    RepliesRequest,
    Reward,
    StoredCall,
    StoredReply,
    TakeReply,
    TakeRequest,
    Ticket,
    WantRequest,
)
from broker.protocol.messages import Refusal, TaskVerdict, Verdict, Verdicts
from buffer import operations
from buffer.operations.conversations import PART_BYTES
from buffer.operations.operation import Operation
from buffer.operations.values import (
    CallLine,
    CallsAnswer,
    EndLine,
    ListenLine,
    RepliesAnswer,
    ReplyLine,
)
from buffer.store import AsyncStore
from configs.settings import BrokerSettings

from .store_cache import StoreCache
from .validation import check_calls, check_ends

MAX_WAITING = 64  # long polls of one key and kind: as many peers as may share it
HEADER_BYTES = 4096  # room for the rest of an answer beside calls or replies, once for each half
MAX_CHANGES = 2**16  # tasks of the log of changes, which is some MiB; older ones are read anew
MAX_DIGITS = 17  # of the number of a change
MAX_NEWS = 96  # conversations of an answer, 64 bytes each beside their calls or replies
ANYTHING = -1  # bell of the requests that wait for no task in particular
WAITS_TOO_OFTEN = "long polls of this key must be at most {most}, got one more; send it again later"

log = structlog.get_logger()
Line = TypeVar("Line", Hear, Listen)
Answer = TypeVar("Answer", RepliesAnswer, CallsAnswer)
Part = TypeVar("Part", Replies, Calls)


class PollKind(StrEnum):
    """What a long poll waits for."""

    CALLS = "calls"
    REPLIES = "replies"
    TICKETS = "tickets"


class Place(NamedTuple):
    """A peer's long poll of a kind, of which it has one."""

    kind: PollKind
    tag: str
    """Tag of the peer's key."""
    incarnation: str


class Bell:
    """A long poll that waits for news of some tasks."""

    def __init__(self, tasks: frozenset[int]) -> None:
        self.tasks = tasks
        self.is_over = False
        """A newer request has taken its place, or the broker stops."""
        self._rung: set[int] = set()
        self._event = asyncio.Event()

    def ring(self, tasks: Iterable[int]) -> None:
        """Note news of tasks; those that it does not wait for are ignored."""
        rung = self.tasks.intersection(tasks)
        if rung:
            self._rung |= rung
            self._event.set()

    def end(self) -> None:
        """Have the request answered now."""
        self.is_over = True
        self._event.set()

    async def wait(self, timeout_s: float) -> set[int]:
        """Wait for news; return the tasks that have some."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._event.wait()
        self._event.clear()
        rung, self._rung = self._rung, set()
        return rung


class Bells:
    """Long polls by the peers that wait, in the order of their requests."""

    def __init__(self) -> None:
        self._places: dict[Place, Bell] = {}
        self._per_key: Counter[tuple[PollKind, str]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._places)

    def hang(self, place: Place, tasks: frozenset[int]) -> Bell | None:
        """Add a long poll in place of the peer's last one; None if its key has too many."""
        if (last := self._places.get(place)) is not None:
            last.end()
            self.remove(place, last)
        if self._per_key[place.kind, place.tag] >= MAX_WAITING:
            return None
        bell = self._places[place] = Bell(tasks)
        self._per_key[place.kind, place.tag] += 1
        return bell

    def remove(self, place: Place, bell: Bell) -> None:
        """Remove a long poll that was answered; the second time does nothing."""
        if self._places.get(place) is bell:
            del self._places[place]
            self._per_key[place.kind, place.tag] -= 1

    def ring(self, kind: PollKind, tasks: Collection[int]) -> None:
        """Wake the long polls that wait for one of these tasks."""
        for place, bell in self._places.items():
            if place.kind is kind:
                bell.ring(tasks)

    def ring_all(self) -> None:
        """Wake all long polls for all that they wait for."""
        for bell in self._places.values():
            bell.ring(bell.tasks)

    def end_all(self) -> None:
        """Have all long polls answered now."""
        for bell in self._places.values():
            bell.end()


class ChangeLog:
    """Conversations by their newest change that this broker has noticed.

    A mark names a change, so that the changes since can be told. Since a mark of another log, as
    after a restart of the broker, or of a change that has been dropped, any may have changed.
    """

    def __init__(self) -> None:
        self._life = secrets.token_hex(4)
        self._newest = self._dropped = 0
        self._numbers: dict[int, int] = {}
        """By task, those that changed last at the end."""

    @property
    def mark(self) -> str:
        """Mark of the newest change."""
        return f"{self._life} {self._newest}"

    def add(self, tasks: Iterable[int]) -> None:
        """Note that these conversations have changed."""
        for task in tasks:
            self._newest += 1
            self._numbers.pop(task, None)
            self._numbers[task] = self._newest
        while len(self._numbers) > MAX_CHANGES:
            self._dropped = self._numbers.pop(next(iter(self._numbers)))

    def since(self, mark: str) -> list[int] | None:
        """Return the conversations that have changed since a mark; None = any may have."""
        life, _, number = mark.partition(" ")
        if life != self._life or not number.isdecimal() or len(number) >= MAX_DIGITS:
            return None
        last = int(number)
        changed = takewhile(lambda pair: pair[1] > last, reversed(self._numbers.items()))
        return [task for task, _ in changed] if last >= self._dropped else None


@dataclass(frozen=True, slots=True)
class Polled(Generic[Line, Answer, Part]):
    """What a long poll reads of conversations, and how it tells news."""

    lines: Sequence[Line]
    since: str
    read: Callable[[Sequence[Line]], Operation[list[Answer]]]
    news_of: Callable[[Line, Answer], Part | None]
    reply: Callable[[tuple[Part, ...], str], object]


class Waiting(NamedTuple):
    """What a long poll waits for."""

    place: Place
    tasks: frozenset[int]
    changed: Set[int]
    """Tasks that are read at once."""
    wait_s: float


class LongPoll:
    """A request without news, whose slot is given back while it waits for some."""

    def __init__(self, answer: Callable[[], Awaitable[object]]) -> None:
        self.answer = answer
        """Waits, and returns the reply."""


class Conversations:
    """Answers requests about mailboxes; permissions and chunks have been checked."""

    def __init__(
        self,
        store: AsyncStore,
        settings: BrokerSettings,
        cache: StoreCache,
        *,
        max_bytes: int,
        agent_s: float,
    ) -> None:
        """Begin without a request.

        Args:
            store: Store of the run.
            settings: Limits and times.
            cache: Tells when no new work may begin.
            max_bytes: Most bytes of a conversation's calls, replies and rewards.
            agent_s: Longest time of an agent, after which its host ends it.
        """
        self._store = store
        self._settings = settings
        self._cache = cache
        self._max_bytes = max_bytes
        self.max_part_bytes = min(max_bytes, settings.max_message_bytes // 2 - HEADER_BYTES)
        """Most bytes of a call or reply; an answer has this much, and at most one of them more."""
        self._max_reward_bytes = min(operations.conversations.MAX_REWARD_BYTES, self.max_part_bytes)
        self._ttl_ms = int(settings.lease_timeout_s * 1000)
        # Behind the host's own limit: once for a ticket that was lost, once for an end on its way.
        self._agent_ms = int(agent_s * 1000) + 2 * self._ttl_ms
        self._bells = Bells()
        self._changes, self._newest = ChangeLog(), 0

    def read_all_anew(self) -> None:
        """Have all conversations read again: Redis is another one, whose changes are others."""
        self._changes, self._newest = ChangeLog(), 0
        self._bells.ring_all()

    async def answer_actor(
        self, message: WantRequest | ListenRequest, incarnation: str, tag: str
    ) -> object:
        """Answer an actor: verdicts on the agents that it wants, or new calls (or a `LongPoll`)."""
        if isinstance(message, ListenRequest):
            return await self._listen(message, incarnation, tag)
        rows = [(want.task_id, want.fence, want.payload) for want in message.wants]
        verdicts = await self._store.run(operations.want_agents(rows, tag))
        if "OK" in verdicts:
            self._bells.ring(PollKind.TICKETS, [ANYTHING])
        return _verdicts([task for task, _, _ in rows], verdicts)

    def said(self, verdicts: Iterable[TaskVerdict]) -> None:
        """Wake the hosts of conversations that have new replies."""
        self._ring_changed(PollKind.REPLIES, verdicts)

    async def answer_host(self, message: object, incarnation: str, tag: str) -> object:
        """Answer a request of a host of agents."""
        match message:
            case TakeRequest():
                return await self._take(message, incarnation, tag)
            case CallRequest():
                return await self._call(message, tag)
            case RepliesRequest():
                return await self._hear(message, incarnation, tag)
            case EndRequest():
                return await self._end(message, tag)
            case _:
                raise AssertionError(f"no request of a host: {type(message).__name__}")

    async def look_for_news(self) -> None:
        """Wake long polls for what passed through other brokers; called at every tick."""
        if not self._bells:
            return
        news = await self._store.run(operations.read_news(self._newest))
        self._newest = news.newest
        self._note_changes(tuple(PollKind), news.tasks)
        if news.wanted:
            self._bells.ring(PollKind.TICKETS, [ANYTHING])

    def close(self) -> None:
        """Answer all long polls now."""
        self._bells.end_all()

    async def _take(self, message: TakeRequest, incarnation: str, tag: str) -> object:
        timeout_s = self._settings.lease_timeout_s

        async def read(_: Set[int]) -> TakeReply | None:
            if self._cache.is_full:
                return None
            take = operations.take_conversations(
                incarnation,
                n=max(1, message.n),
                ttl_ms=self._ttl_ms,
                key=tag,
                newest=message.newest,
                most_bytes=self.max_part_bytes,
            )
            status, taken, num_silent, rest_ms = await self._store.run(take)
            if status == "RESTS":
                log.warning(
                    "a host rests, because its agents end without a call; see its log",
                    host=incarnation,
                    key=tag,
                    agents=num_silent,
                    rest_s=rest_ms / 1000,
                )
            tickets = [Ticket(t.task_id, t.ticket, decode_spec(t.spec), t.payload) for t in taken]
            is_new = status in {"OK", "DONE", "RESTS"}
            reply = TakeReply(status, tuple(tickets), timeout_s, num_silent, rest_ms / 1000)
            return reply if is_new else None

        place, anything = Place(PollKind.TICKETS, tag, incarnation), frozenset([ANYTHING])
        waiting = Waiting(place, anything, anything, message.wait_s)
        return await self._poll(waiting, read, lambda: TakeReply("WAIT", (), timeout_s))

    async def _call(self, message: CallRequest, tag: str) -> Verdicts:
        check_calls(message, max_bytes=self.max_part_bytes)
        lines = [
            CallLine(c.task_id, c.ticket, c.number, c.parent, c.keep, c.tail) for c in message.calls
        ]
        call = operations.add_calls(lines, tag, max_bytes=self._max_bytes)
        verdicts = tuple(
            TaskVerdict(line.task_id, Verdict(verdict), num_calls)
            for line, (verdict, num_calls) in zip(lines, await self._store.run(call), strict=True)
        )
        self._ring_changed(PollKind.CALLS, verdicts)
        return Verdicts(verdicts)

    async def _end(self, message: EndRequest, tag: str) -> Verdicts:
        rewards = [
            b"" if e.reward is None else encode_reward(Reward(e.number, e.reward, e.parts))
            for e in message.ends
        ]
        check_ends(message, rewards)
        lines = [
            EndLine(
                end.task_id,
                end.ticket,
                end.heard,
                f"{end.why}\n{end.text}" if end.text else end.why,
                end.number,
                end.order,
                reward,
            )
            for end, reward in zip(message.ends, rewards, strict=True)
        ]
        end = operations.end_conversations(
            lines,
            tag,
            max_bytes=self._max_bytes,
            max_reward_bytes=self._max_reward_bytes,
            max_attempts=self._settings.max_attempts,
        )
        verdicts = _verdicts([line.task_id for line in lines], await self._store.run(end))
        self._ring_changed(PollKind.CALLS, verdicts.verdicts)
        return verdicts

    async def _hear(self, message: RepliesRequest, incarnation: str, tag: str) -> object:
        def read(lines: Sequence[Hear]) -> Operation[list[RepliesAnswer]]:
            return operations.read_replies(
                [ReplyLine(line.task_id, line.ticket, line.heard) for line in lines],
                tag,
                ttl_ms=self._ttl_ms,
                agent_ms=self._agent_ms,
                max_attempts=self._settings.max_attempts,
                most_bytes=self.max_part_bytes,
            )

        polled = Polled(message.conversations, message.since, read, _replies, RepliesReply)
        return await self._follow(Place(PollKind.REPLIES, tag, incarnation), polled, message.wait_s)

    async def _listen(self, message: ListenRequest, incarnation: str, tag: str) -> object:
        def read(lines: Sequence[Listen]) -> Operation[list[CallsAnswer]]:
            return operations.read_calls(
                [ListenLine(t.task_id, t.fence, t.ticket, t.num_calls, t.num_said) for t in lines],
                tag,
                max_attempts=self._settings.max_attempts,
                most_bytes=self.max_part_bytes,
            )

        polled = Polled(message.tasks, message.since, read, _calls, CallsReply)
        return await self._follow(Place(PollKind.CALLS, tag, incarnation), polled, message.wait_s)

    async def _follow(
        self,
        place: Place,
        polled: Polled[Line, Answer, Part],
        wait_s: float,
    ) -> object:
        """Read conversations now, and those that change while the request waits."""
        tasks = frozenset(line.task_id for line in polled.lines)
        changes = self._changes  # which another Redis replaces, so that its marks tell nothing
        newer = changes.since(polled.since)
        changed = tasks if newer is None else tasks.intersection(newer)

        mark = changes.mark

        async def read(changed: Set[int]) -> object | None:
            nonlocal mark
            mark = changes.mark
            asked = [line for line in polled.lines if line.task_id in changed]
            if not asked:
                return None
            answers = await self._store.run(polled.read(asked))
            news = [
                part
                for line, answer in zip(asked, answers, strict=True)
                if (part := polled.news_of(line, answer)) is not None
            ]
            is_whole = len(news) <= MAX_NEWS and _num_bytes(news) <= self.max_part_bytes / 2
            return polled.reply(tuple(news[:MAX_NEWS]), mark if is_whole else "") if news else None

        waiting = Waiting(place, tasks, changed, wait_s)
        return await self._poll(waiting, read, lambda: polled.reply((), mark))

    def _ring_changed(self, kind: PollKind, verdicts: Iterable[TaskVerdict]) -> None:
        self._note_changes([kind], {v.task_id for v in verdicts if v.verdict is Verdict.OK})

    def _note_changes(self, kinds: Iterable[PollKind], tasks: Collection[int]) -> None:
        self._changes.add(tasks)
        for kind in kinds:
            self._bells.ring(kind, tasks)

    async def _poll(
        self,
        waiting: Waiting,
        read: Callable[[Set[int]], Awaitable[object | None]],
        nothing: Callable[[], object],
    ) -> object:
        """Read once; without news return a long poll, whose bell was hung before the reading."""
        place, tasks, changed, wait_s = waiting
        if wait_s <= 0:
            return await read(changed) or nothing()
        bell = self._bells.hang(place, tasks)
        if bell is None:
            return Refusal("busy", WAITS_TOO_OFTEN.format(most=MAX_WAITING), retry_after_s=wait_s)
        clock = asyncio.get_running_loop().time
        ends_at = clock() + min(wait_s, self._settings.long_poll_s)

        async def until_news() -> object:
            try:
                while not bell.is_over and clock() < ends_at:
                    rung = await bell.wait(ends_at - clock())
                    if rung and (reply := await read(rung)) is not None:
                        return reply
                return nothing()
            finally:
                self._bells.remove(place, bell)

        try:
            reply = await read(changed)
        except BaseException:
            self._bells.remove(place, bell)
            raise
        if reply is None:
            return LongPoll(until_news)
        self._bells.remove(place, bell)
        return reply


def _num_bytes(news: Sequence[Replies | Calls]) -> float:
    """Count what an answer has, as the scripts do; an end may leave no room for anything else."""
    total = 0.0
    for part in news:
        if isinstance(part, Replies):
            total += sum(len(reply.reply) + PART_BYTES for reply in part.replies)
        else:
            total += math.inf if part.why else sum(len(c.tail) + PART_BYTES for c in part.calls)
    return total


def _replies(line: Hear, answer: RepliesAnswer) -> Replies | None:
    """Return what is new to a host; None = nothing."""
    has_lost = answer.num_calls < line.num_calls
    if not answer.replies and answer.verdict == "OK" and not has_lost:
        return None
    replies = tuple(StoredReply(*reply) for reply in answer.replies)
    return Replies(line.task_id, line.ticket, Verdict(answer.verdict), answer.num_calls, replies)


def _calls(line: Listen, answer: CallsAnswer) -> Calls | None:
    """Return what is new to an actor; None = nothing."""
    if not answer.calls and not answer.why and answer.verdict == "OK":
        return None
    why, _, text = answer.why.partition("\n")
    return Calls(
        line.task_id,
        Verdict(answer.verdict),
        answer.ticket,
        answer.num_calls,
        why,
        tuple(decode_reward(reward) for reward in answer.rewards.values()),
        tuple(StoredCall(*call) for call in answer.calls),
        text,
    )


def _verdicts(tasks: Sequence[int], verdicts: Sequence[str]) -> Verdicts:
    lines = zip(tasks, verdicts, strict=True)
    return Verdicts(tuple(TaskVerdict(task, Verdict(verdict)) for task, verdict in lines))
