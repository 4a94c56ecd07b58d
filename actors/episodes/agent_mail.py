"""Messages between one actor and the mailboxes of its live agents.

    begin --want--> listen: one long poll for all conversations --> calls
    put_replies --> say: each reply in the write that stores its tokens

Consumes what `Sampling` puts in; waits for agents, through the broker. A conversation whose agent
works holds no place in the engine, and no request here but its line in the long poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from actors.engine.engine import Engine
from broker.protocol.conversation_messages import (
    Calls,
    Listen,
    ListenRequest,
    Say,
    SayRequest,
    Want,
    WantRequest,
)
from broker.protocol.messages import Beat, FailureKind, TaskVerdict, Verdict
from configs.errors import RecordError, RefusedError

from .agent_rollout import AgentRollout
from .held_leases import MAX_CHUNK_BYTES, HeldLease, HeldLeases, LeaseStage, next_chunk
from .interfaces import MailboxClient

LISTEN_S = 20.0  # the broker answers sooner if it is set so
AGAIN_S = 0.2  # until a host has repeated a call that the store has lost, or for what is left over
T = TypeVar("T")
LISTENED = (LeaseStage.ACTIVE, LeaseStage.WANTED, LeaseStage.AWAY)


class Undelivered(NamedTuple):
    """A conversation that has no use for its replies."""

    held: HeldLease
    kind: FailureKind | None
    """None = another actor holds its lease."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Letter:
    """Replies of one conversation, the first with all tokens that the store lacks."""

    held: HeldLease
    rollout: AgentRollout
    says: tuple[Say, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(say.beat.chunk) + len(say.reply) for say in self.says)


class AgentMail:
    """Calls of live agents to one actor, and its replies."""

    def __init__(
        self,
        broker: MailboxClient,
        engine: Engine,
        leases: HeldLeases,
        *,
        deadline_s: float,
    ) -> None:
        """Connect the parts.

        Args:
            broker: Has the mailboxes.
            engine: Its version is sent along.
            leases: The leases of the actor.
            deadline_s: Longest silence of the broker.
        """
        self._broker = broker
        self._leases = leases
        self._engine = engine
        self._deadline_s = deadline_s
        self._unwanted: list[HeldLease] = []
        self._speaking: dict[HeldLease, AgentRollout] = {}
        self._changed = asyncio.Event()
        self._spoken = asyncio.Event()
        self._is_stopped = False

    def begin(self, held: HeldLease) -> None:
        """Have a conversation wait for an agent, and listen to it."""
        self._unwanted.append(held)
        self._changed.set()

    def put_replies(self, held: HeldLease) -> None:
        """Send the replies that wait."""
        rollout = held.agent()
        if rollout is not None and rollout.replies:
            self._speaking[held] = rollout
            self._spoken.set()

    def stop(self) -> None:
        """Listen no more; replies that wait are still sent."""
        self._is_stopped = True
        self._changed.set()

    async def listen(self) -> list[tuple[HeldLease, Calls]]:
        """Wait for calls, and for the ends of agents.

        Raises:
            DeadlineError: The broker does not answer.
        """
        while True:
            self._changed.clear()
            if lost := await self._want():
                return lost
            lines = [
                Listen(
                    held.lease.task_id,
                    held.lease.fence,
                    held.ticket,
                    rollout.num_read,
                    rollout.num_said,
                )
                for held in self._leases
                if (rollout := held.agent()) is not None and held.stage in LISTENED
            ]
            if self._is_stopped or not lines:
                await self._changed.wait()
                continue
            news = await self._ask(ListenRequest(tuple(lines), LISTEN_S))
            if news:
                return news

    async def say(self) -> list[Undelivered]:
        """Wait for replies, send them, and return the conversations that can hear none.

        Raises:
            DeadlineError: The broker does not answer.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S if self._speaking else None):
                await self._spoken.wait()
        self._spoken.clear()
        undelivered: list[Undelivered] = []
        letters = [letter for letter in self._letters() if letter.says]
        for portion in _portions(letters, lambda letter: letter.num_bytes):
            undelivered += await self._send(portion)
        return undelivered

    async def _want(self) -> list[tuple[HeldLease, Calls]]:
        """Ask for agents; return conversations that another actor holds."""
        wanted = [held for held in self._unwanted if not held.has_ended]
        self._unwanted = []
        if not wanted:
            return []
        places = [(held.lease.task_id, held.lease.fence) for held in wanted]
        payloads = [rollout.conversation.payload for held in wanted if (rollout := held.agent())]
        wants = [Want(*place, payload) for place, payload in zip(places, payloads, strict=True)]
        verdicts: list[TaskVerdict] = []
        try:
            for portion in _portions(wants, lambda want: len(want.payload)):
                request = WantRequest(tuple(portion))
                verdicts += (await self._broker.want(request, deadline_s=self._deadline_s)).verdicts
        except BaseException:
            self._unwanted += wanted
            raise
        return [
            (held, Calls(line.task_id, line.verdict))
            for held, line in zip(wanted, verdicts, strict=True)
            if line.verdict is not Verdict.OK
        ]

    async def _ask(self, request: ListenRequest) -> list[tuple[HeldLease, Calls]]:
        """Listen until there is something, or until other conversations are to be listened to."""
        asked = asyncio.create_task(self._broker.listen(request, deadline_s=self._deadline_s))
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({asked, changed}, return_when=asyncio.FIRST_COMPLETED)
            reply = asked.result() if asked.done() else None
        finally:
            asked.cancel()
            changed.cancel()
            await asyncio.gather(asked, changed, return_exceptions=True)
        fences = {line.task_id: line.fence for line in request.tasks}
        news: list[tuple[HeldLease, Calls]] = []
        for calls in reply.tasks if reply is not None else ():
            held = self._leases.get(calls.task_id)
            if held is None or held.lease.fence != fences[calls.task_id]:
                continue
            if calls.verdict is Verdict.UNCALLED:  # the store has lost that it was wanted
                self.begin(held)
            else:
                news.append((held, calls))
        return news

    def _letters(self) -> Iterator[_Letter]:
        for held, rollout in list(self._speaking.items()):
            if held.has_ended or not rollout.replies:
                del self._speaking[held]
                continue
            beat, num_bytes = next_chunk(held), 0
            says: list[Say] = []
            for number, (turn_end, reply) in rollout.replies.items():
                if says and num_bytes + len(reply) > MAX_CHUNK_BYTES:
                    break  # the others go with the next letter
                says.append(Say(beat, held.ticket, number, turn_end, reply))
                num_bytes += len(beat.chunk) + len(reply)
                beat = Beat(held.lease.task_id, held.lease.fence, rollout.length)
            yield _Letter(held, rollout, tuple(says))

    async def _send(self, letters: Sequence[_Letter]) -> list[Undelivered]:
        says = tuple(say for letter in letters for say in letter.says)
        request = SayRequest(says, self._engine.version)
        try:
            reply = await self._broker.say(request, deadline_s=self._deadline_s)
        except (RecordError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.code != "malformed":
                raise
            if len(letters) > 1:  # one of them may be at fault
                answers = [await self._send([letter]) for letter in letters]
                return [undelivered for answer in answers for undelivered in answer]
            self._speaking.pop(letters[0].held, None)
            return [Undelivered(letters[0].held, "data", f"reply refused: {error}")]
        verdicts = iter(reply.verdicts)
        refused = [
            undelivered
            for letter in letters
            for say in letter.says
            if (undelivered := self._settle(letter, say, next(verdicts))) is not None
        ]
        for letter in letters:
            self._rest(letter)
        return list({undelivered.held: undelivered for undelivered in refused}.values())

    def _settle(self, letter: _Letter, say: Say, line: TaskVerdict) -> Undelivered | None:
        """Apply the store's verdict on a reply; without its tokens or call it is sent again."""
        held = letter.held
        if held.has_ended:
            return None
        if line.verdict in (Verdict.OK, Verdict.DUP, Verdict.GAP):
            self._leases.note_verdict(held, say.beat, line.length)
            if line.verdict is not Verdict.GAP:
                letter.rollout.confirm(say.number)
            return None
        if line.verdict is Verdict.UNCALLED:
            return None
        if line.verdict is Verdict.OTHER:
            reason = f"another reply than this log's was said to call {say.number}"
            return Undelivered(held, "infrastructure", reason)
        return Undelivered(held, None)

    def _rest(self, letter: _Letter) -> None:
        """Give up the place of a conversation that has nothing left to do."""
        held = letter.held
        if not letter.rollout.replies:
            self._speaking.pop(held, None)
        if held.stage is LeaseStage.ACTIVE and held.agent() and letter.rollout.is_waiting:
            self._leases.leave(held)


def _portions(items: Iterable[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide what is to be sent among messages of bounded size."""
    portion, total = list[T](), 0
    for item in items:
        if portion and total + num_bytes(item) > MAX_CHUNK_BYTES:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += num_bytes(item)
    if portion:
        yield portion
