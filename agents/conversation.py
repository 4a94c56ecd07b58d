"""One conversation of an agent at its host: calls under way, replies, rewards, and its end.

    agent's request --call--> numbered, stored in the mailbox --> open --reply--> answered
                      |                                             |
                      +-- a retry of a call joins it ---------------+

A call is stored once, and stays when its agent's connection is cut: its reply is sampled, trained
on, and kept for a retry (`call_log.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import NamedTuple, Protocol

import structlog

from broker.client import DEFAULT_DEADLINE_S
from broker.protocol.agent_calls import AgentError, AgentReply, decode_reply
from broker.protocol.conversation_messages import (
    Call,
    CallRequest,
    End,
    Ending,
    EndRequest,
    Hear,
    Replies,
    RepliesReply,
    RepliesRequest,
    TakeReply,
    TakeRequest,
    Ticket,
)
from broker.protocol.messages import MAX_REASON, TaskVerdict, Verdict, Verdicts
from buffer.operations.conversations import MAX_CALLS, MAX_OPEN_CALLS
from configs.errors import DeadlineError, RecordError, RefusedError

from .call_log import CallLog, OpenCall, OpenCalls
from .requests import AgentRequest, RequestError, RewardRequest

BODIES_AT_A_TIME = 4
"""Bodies in memory before they are in the log of calls; others wait for their turn."""
KEPT_ENDS = 4096
"""Ended conversations that are remembered: as many as a host ends in hours, in a megabyte."""
BUSY_S = 1  # an open call takes seconds
END_TRY_S = 5.0  # of one try to store an end, and so how long a host that stops may wait for it
ENDS_AT_A_TIME = 1024  # of one request: a quarter of what the broker takes
UNREACHABLE = "run_unreachable"
MAX_RETRY_KEY = 256  # characters
MAX_TOLD = 64  # ignored fields that are logged, and characters of each

log = structlog.get_logger()


class Mailbox(Protocol):
    """What a host asks the broker: a `BrokerClient` with a host's key."""

    async def take(
        self, request: TakeRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> TakeReply: ...

    async def call(
        self, request: CallRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Verdicts: ...

    async def hear(
        self, request: RepliesRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> RepliesReply: ...

    async def end(
        self, request: EndRequest, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Verdicts: ...


class AgentEnd(NamedTuple):
    """The end of a conversation."""

    why: Ending
    text: str = ""
    """Reason for people, such as the agent's last output."""


class AgentConversation:
    """A ticket, the key of its agent, and what was said under it.

    Args:
        ticket: Ticket of the conversation.
        mailbox: Mailbox of the run.
    """

    def __init__(self, ticket: Ticket, mailbox: Mailbox) -> None:
        self.name = f"{ticket.task_id}-{ticket.ticket}"
        self.ticket = ticket
        self.key = secrets.token_urlsafe(32)
        self.over = asyncio.Event()
        """Set when nothing more can be said."""
        self.end: AgentEnd | None = None
        """Why it is over; None where the store has lost it, or it goes on."""
        self.bodies = asyncio.Semaphore(BODIES_AT_A_TIME)
        """Held by a request while its body is read and stored."""
        self.open_calls = OpenCalls()
        self.num_requests = 0
        """Requests under way at the door."""
        self._mailbox = mailbox
        self._calls = CallLog()
        self._order = asyncio.Lock()
        self._heard = 0
        self._ending = asyncio.Lock()
        self._is_last_try = False
        self.is_settled = False
        """Whether nothing is left to tell the store: it has the end, or lost the conversation."""
        self._rewards: dict[int, End] = {}
        """Newest reward of each call; 0 = of the whole."""
        self._num_rewards = 0
        self._told: set[str] = set()

    def where(self) -> Hear:
        """Return how far the agent has heard, and the calls that the store must have."""
        # One may be on its way, and after the end none is sent again.
        is_known = not self._order.locked() and not self.over.is_set()
        return Hear(*self._place, self._heard, len(self._calls) if is_known else 0)

    async def call(
        self, request: AgentRequest, *, key: str = "", is_retry: bool = False
    ) -> OpenCall:
        """Store a call, or find the earlier one that it is a retry of.

        Args:
            request: The request.
            key: Its `Idempotency-Key`.
            is_retry: Whether the agent's SDK calls it a retry.

        Raises:
            RequestError: It cannot be stored.
        """
        self._tell_ignored(request)
        digest = request.digest
        async with self._order:
            earlier = self.open_calls.join(digest, key[:MAX_RETRY_KEY], is_retry=is_retry)
            if earlier is not None:
                return earlier
            self._check_places(digest)
            self._calls.add(request.stored)
            call = self.open_calls.add(len(self._calls), digest, key[:MAX_RETRY_KEY])
            await self._store_from(call.number)
            return call

    async def reward(self, request: RewardRequest) -> None:
        """Store a reward, or the end that the agent asks for, or both.

        Raises:
            RequestError: There is no such call, or the conversation is over.
        """
        if request.number > len(self._calls):
            text = f"call must be one of {len(self._calls)} calls, got {request.number}"
            raise RequestError(400, text, field="call")
        if request.reward is not None:
            self._num_rewards += 1
            reward = End(
                *self._place,
                self._heard,
                number=request.number,
                order=self._num_rewards,
                reward=request.reward,
                parts=dict(request.parts),
            )
            before = self._rewards.get(request.number)
            self._rewards[request.number] = reward  # an end that comes meanwhile has it, too
            try:
                await self._say(reward)
            except RequestError as error:
                if error.code != UNREACHABLE and self._rewards.get(request.number) is reward:
                    if before is None:
                        del self._rewards[request.number]
                    else:
                        self._rewards[request.number] = before
                raise
        if request.error:
            log.warning("agent gave up", task=self.name, reason=request.error)
            await self.finish(AgentEnd("died", request.error))
        elif request.is_done:
            await self.finish(AgentEnd("ended"))

    async def finish(self, end: AgentEnd) -> None:
        """End the conversation, and wait until the store has its end; the first end counts.

        The end is sent until it is answered, and the ticket is to be renewed meanwhile. Rewards
        that a store has lost come again with it.
        """
        if not self.over.is_set():
            self._close(end)
        async with self._ending:
            while self.end is not None and not self.is_settled:
                await self._try_end(self.end)

    def give_up(self) -> None:
        """Have `finish` try to store the end once more at most."""
        self._is_last_try = True

    def take_replies(self, replies: Replies) -> bool:
        """Give replies to the requests that wait for them.

        Returns:
            Whether the store lacks calls, which are to be sent again.
        """
        if replies.verdict is not Verdict.OK:
            log.warning("conversation lost", task=self.name, verdict=str(replies.verdict))
            self._close(None)
            return False
        for reply in replies.replies:
            self._heard = max(self._heard, reply.stamp)
            self.open_calls.answer(reply.number, _reply_of(reply.reply))
        self.open_calls.drop_oldest()
        return replies.num_calls < self.where().num_calls

    async def repeat_calls(self, number: int) -> None:
        """Send calls from this one on again, which the store has lost."""
        async with self._order:
            log.warning("the store has lost calls, which are sent again", task=self.name)
            try:
                await self._store_from(number)
            except RequestError as error:
                log.warning("a call cannot be sent again", task=self.name, reason=error.text)
                await self.finish(AgentEnd("host", "the store has lost a call that does not fit"))

    @property
    def _place(self) -> tuple[int, int]:
        return self.ticket.task_id, self.ticket.ticket

    def _check_places(self, digest: bytes) -> None:
        if self.over.is_set():
            raise _over(self.end)
        if len(self._calls) >= MAX_CALLS:
            text = f"a conversation must have at most {MAX_CALLS} calls; end it"
            raise RequestError(400, text, code="too_many_calls")
        if self.open_calls.num_waiting >= MAX_OPEN_CALLS:
            self.open_calls.note_refused(digest)
            raise _busy()

    async def _store_from(self, number: int) -> None:
        """Store calls from this one on, and earlier ones that the store lacks.

        Without an answer the agent waits, and the calls are sent again (`repeat_calls`).

        Raises:
            RequestError: One is refused.
        """
        while number <= len(self._calls) and not self.over.is_set():
            line = await self._store(number)
            if line is None:
                return
            number = line.length + 1

    async def _store(self, number: int) -> TaskVerdict | None:
        """Send a call to the mailbox; None = without an answer.

        Raises:
            RequestError: It is refused.
        """
        delta = self._calls[number]
        call = Call(*self._place, number, delta.parent, delta.keep, delta.tail)
        try:
            (line,) = (await self._mailbox.call(CallRequest((call,)))).verdicts
        except DeadlineError as error:
            log.warning("a call waits for the run", task=self.name, reason=str(error))
            return None
        except (RecordError, RefusedError) as error:
            self._take_back(number)
            raise _refused(error) from None
        if line.verdict in {Verdict.OK, Verdict.DUP, Verdict.GAP}:
            return line
        if line.verdict not in {Verdict.BUSY, Verdict.FULL}:
            self._close(None)
            raise _over(None)
        self._take_back(number)
        if line.verdict is Verdict.BUSY:
            raise _busy()
        text = "the calls and replies of a conversation must fit its mailbox; end it"
        raise RequestError(400, text, code="conversation_full")

    def _take_back(self, number: int) -> None:
        if number == len(self._calls):
            self._calls.take_back()
            self.open_calls.refuse(number)

    async def _try_end(self, end: AgentEnd) -> None:
        last = End(*self._place, self._heard, why=end.why, text=end.text[-MAX_REASON:])
        lines = [*self._rewards.values(), last]
        try:
            for start in range(0, len(lines), ENDS_AT_A_TIME):
                await self._say(*lines[start : start + ENDS_AT_A_TIME], deadline_s=END_TRY_S)
            self.is_settled = True
        except RequestError as error:
            told = {"task": self.name, "reason": error.text}
            if self._rewards and error.code != UNREACHABLE and not self.is_settled:
                log.warning("a reward of a conversation was refused", **told)
                self._rewards.clear()  # the store has those that it has taken, and the end is next
                return
            self.is_settled = self.is_settled or self._is_last_try or error.code != UNREACHABLE
            if self.is_settled:
                log.warning("the end of a conversation was not stored", **told)
            else:
                log.warning("the end of a conversation waits for the run", **told)
                await asyncio.sleep(BUSY_S)

    async def _say(self, *ends: End, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Store rewards, or the end behind them.

        Raises:
            RequestError: The last of them is refused.
        """
        try:
            reply = await self._mailbox.end(EndRequest(ends), deadline_s=deadline_s)
        except (DeadlineError, RecordError, RefusedError) as error:
            if not _is_malformed(error):
                raise _unreachable(error) from None
            text = f"the run refuses a reward: {error!s:.300}; correct it"
            raise RequestError(400, text, field="reward") from None
        *_, line = reply.verdicts
        if line.verdict is Verdict.FULL:
            text = "the rewards of a conversation's calls must fit its mailbox; reward the whole"
            raise RequestError(400, text, field="reward", code="conversation_full")
        if line.verdict is Verdict.GAP:
            text = "the run has lost calls, which are sent again; try again"
            raise RequestError(503, text, code="calls_lost", retry_after_s=BUSY_S)
        if line.verdict not in {Verdict.OK, Verdict.DUP}:
            self._close(None)
            raise _over(None)

    def _close(self, end: AgentEnd | None) -> None:
        """Note why it is over; None = the store has lost it."""
        self.end, self.is_settled = self.end or end, self.is_settled or end is None
        self.over.set()

    def _tell_ignored(self, request: AgentRequest) -> None:
        names = [name[:MAX_TOLD] for name in request.ignored[:MAX_TOLD]]
        new = [name for name in names if name not in self._told]
        if new and len(self._told) < MAX_TOLD:
            self._told.update(new)
            log.info("the run decides these fields of a call", task=self.name, ignored=new)


class EndedConversation(NamedTuple):
    """What is kept of a conversation that has ended."""

    key: str
    end: AgentEnd | None


class HostedConversations:
    """Conversations of a host by name; of the newest that have ended, their keys and reasons."""

    def __init__(self) -> None:
        self.under_way: dict[str, AgentConversation] = {}
        self._ended: dict[str, EndedConversation] = {}

    def begin(self, conversation: AgentConversation) -> None:
        """Let requests find a conversation under its name."""
        self.under_way[conversation.name] = conversation

    def end(self, conversation: AgentConversation) -> None:
        """Remove a conversation with its calls and replies."""
        del self.under_way[conversation.name]
        why = None if conversation.end is None else AgentEnd(conversation.end.why)
        self._ended[conversation.name] = EndedConversation(conversation.key, why)
        if len(self._ended) > KEPT_ENDS:
            del self._ended[next(iter(self._ended))]

    def find(self, name: str, key: str) -> AgentConversation:
        """Return the conversation of a name and a key.

        Raises:
            RequestError: It is over, or there is none, or the key is another's.
        """
        one = self.under_way.get(name) or self._ended.get(name)
        if one is None or not hmac.compare_digest(key.encode(), one.key.encode()):
            text = "the key must be that of a conversation of this host, got another or none"
            raise RequestError(401, text, code="invalid_api_key")
        if isinstance(one, EndedConversation) or one.over.is_set():
            raise _over(one.end)
        return one


def as_error(reply: AgentError) -> RequestError:
    """Return the error that an actor replied with."""
    return RequestError(reply.status, reply.text, field=reply.field or None)


def over_error(conversation: AgentConversation) -> RequestError:
    """Return the error of calls that were open when their conversation ended."""
    return _over(conversation.end)


def _reply_of(stored: bytes) -> AgentReply:
    try:
        return decode_reply(stored)
    except RecordError as error:
        log.error("a reply cannot be read", reason=str(error))
        return AgentError(500, "the reply of the actor cannot be read; see the log of the host")


def _over(end: AgentEnd | None) -> RequestError:
    why = "lost" if end is None else end.why
    # 410: SDKs repeat 409 and all of 5xx.
    return RequestError(410, f"the conversation is over: {why}", code="conversation_over")


def _busy() -> RequestError:
    text = f"a conversation must have at most {MAX_OPEN_CALLS} open calls; wait for replies"
    return RequestError(429, text, code="too_many_open_calls", retry_after_s=BUSY_S)


def _refused(error: RecordError | RefusedError) -> RequestError:
    if not _is_malformed(error):
        return _unreachable(error)
    text = f"a call must fit a message of the broker: {error!s:.300}; cut the messages"
    return RequestError(413, text, code="body_too_long")


def _is_malformed(error: Exception) -> bool:
    """Whether the message itself is at fault, so that it is refused whenever it comes."""
    is_refused = isinstance(error, RefusedError) and error.code == "malformed"
    return is_refused or isinstance(error, RecordError)


def _unreachable(error: Exception) -> RequestError:
    text = f"the run does not answer: {error!s:.300}; try again"
    return RequestError(503, text, code=UNREACHABLE, retry_after_s=BUSY_S)
