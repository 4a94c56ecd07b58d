"""Messages of conversations with live agents: their actors and hosts on both sides of the broker.

    actor                         broker                         host of agents
    WantRequest     ─────────────▶        ◀───────────────────── TakeRequest -> TakeReply
    ListenRequest   ◀──── CallsReply      ◀───────────────────── CallRequest
    SayRequest      ─────────────▶        RepliesReply ─────────▶ RepliesRequest
                                          ◀───────────────────── EndRequest

Requests without a reply of their own get `Verdicts`. Those with `wait_s` are long polls: their
replies have lines only for the conversations that have something new, or that are over.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from buffer.record.episode import PolicyVersion

from .fields import Many, MessagePart, Real, Text, Whole, WireMessage
from .messages import MAX_REASON, Beat, Id, Lines, TaskSpec, Verdict

MAX_PAYLOAD = 16 * 1024
"""Bytes that an actor may tell an agent beside the task's spec."""
MAX_PARTS = 64
"""Named parts of a reward, as in a record."""
MAX_REWARD = 4096
"""Bytes of a reward with its parts."""

Stamp = Annotated[int, Meta(ge=0, le=2**53 - 1)]  # a double in Redis
Ending = Literal["", "ended", "died", "timeout", "memory", "host"]
"""Why a conversation ends; empty = it goes on. `ended`: as its agent wished; `died`: the agent's
exit code is not 0; `timeout`, `memory`: it had more than it may; `host`: its host stops, or could
not start it, which is not the agent's fault."""


class Want(MessagePart, frozen=True):
    """A leased task whose turns a live agent makes."""

    task_id: Id
    fence: Id
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD)] = b""
    """What the agent is told, which only the actor and the agent understand."""


class WantRequest(WireMessage, frozen=True, tag="want"):
    """Actor -> broker, before the first token: these tasks wait for agents."""

    wants: Lines[Want]


class Listen(MessagePart, frozen=True):
    """A conversation whose actor waits for calls."""

    task_id: Id
    fence: Id
    ticket: Id = 0
    """Ticket that the actor was shown; 0 = none yet."""
    num_calls: Id = 0
    """Calls that the actor has."""
    num_said: Id = 0
    """Replies that the actor knows to be stored."""


class ListenRequest(WireMessage, frozen=True, tag="listen"):
    """Actor -> broker, long poll: calls after those that it has."""

    tasks: Lines[Listen]
    wait_s: Real = 0.0
    since: Text = ""
    """`CallsReply.since` of an answer to a request with all these tasks; empty = read all."""


class Reward(MessagePart, frozen=True):
    """A reward for a call, or for the whole conversation (0)."""

    number: Id
    reward: Real
    parts: Annotated[dict[Text, Real], Meta(max_length=MAX_PARTS)] = field(default_factory=dict)


class StoredCall(MessagePart, frozen=True):
    """A call. Its body is the first `keep` bytes of its parent's body (0: of nothing), and tail."""

    parent: Id
    keep: Id
    tail: bytes
    is_answered: bool


class Calls(MessagePart, frozen=True):
    """New calls of a conversation, or its end."""

    task_id: Id
    verdict: Verdict
    ticket: Id = 0
    """0 = no host has taken the conversation."""
    num_calls: Id = 0
    """Calls stored; where these are fewer, the next request gets the rest."""
    why: Text = ""
    """Why it has ended; empty = it goes on."""
    rewards: Many[Reward] = ()
    """Empty before the end."""
    calls: Many[StoredCall] = ()
    text: Text = ""
    """What its host says of the end, such as the last output of its agent."""


class CallsReply(WireMessage, frozen=True, tag="calls"):
    """Broker -> actor: what is new to it in its conversations."""

    tasks: Many[Calls]
    since: Text = ""
    """Newest change up to which the answer is whole; empty = read all next time."""


class Say(MessagePart, frozen=True):
    """A reply, with the tokens of its turn that the store lacks."""

    beat: Beat
    ticket: Id
    """`Calls.ticket` of the call: another agent's calls have the same numbers."""
    number: Id
    turn_end: Id
    """Tokens of the log up to the end of its turn; 0 = an error, which has no turn."""
    reply: bytes


class SayRequest(WireMessage, frozen=True, tag="say"):
    """Actor -> broker: replies, each stored once the log reaches the end of its turn."""

    says: Lines[Say]
    version: PolicyVersion


class TakeRequest(WireMessage, frozen=True, tag="take"):
    """Host -> broker, long poll: at most `n` conversations that wait for agents."""

    n: Whole
    newest: Id = 0
    """Newest ticket that the host knows, 0 = none: if a newer one was lost, it comes again."""
    wait_s: Real = 0.0


class Ticket(MessagePart, frozen=True):
    """A conversation that this host has. Its number is the host's fence."""

    task_id: Id
    ticket: Id
    spec: TaskSpec
    payload: bytes
    """`Want.payload`."""


class TakeReply(WireMessage, frozen=True, tag="tickets"):
    """Broker -> host. `status` as in `LeaseReply`, or RESTS: its agents end without a call."""

    status: Text
    tickets: Many[Ticket]
    ticket_timeout_s: Real
    """Time without a `RepliesRequest` that names it after which a ticket is lost."""
    num_silent: Whole = 0
    """Agents of a host that rests, in a row, that have ended without a call."""
    rest_s: Real = 0.0
    """Time until it is given a conversation again."""


class Call(MessagePart, frozen=True):
    """A call of an agent; calls of a conversation are numbered from 1."""

    task_id: Id
    ticket: Id
    number: Id
    parent: Id
    keep: Id
    tail: bytes


class CallRequest(WireMessage, frozen=True, tag="call"):
    """Host -> broker: calls of its agents, each stored once."""

    calls: Lines[Call]


class Hear(MessagePart, frozen=True):
    """A conversation whose host waits for replies."""

    task_id: Id
    ticket: Id
    heard: Stamp = 0
    """Stamp of the newest reply that its agent has heard; 0 = none."""
    num_calls: Id = 0
    """Calls that the store must have; if it has fewer, it is set back, and the reply says so."""


class RepliesRequest(WireMessage, frozen=True, tag="hear"):
    """Host -> broker, long poll: renews tickets, and asks for replies. Names all conversations."""

    conversations: Lines[Hear]
    wait_s: Real = 0.0
    since: Text = ""
    """`RepliesReply.since` of an answer to a request with all these conversations: only tickets of
    those that have changed since are renewed. Empty = all are."""


class StoredReply(MessagePart, frozen=True):
    """A reply to a call."""

    stamp: Stamp
    number: Id
    reply: bytes


class Replies(MessagePart, frozen=True):
    """New replies of a conversation; any verdict but OK is its end."""

    task_id: Id
    ticket: Id
    """A host may have taken a task again whose earlier ticket it lost."""
    verdict: Verdict
    num_calls: Id = 0
    """Calls stored; fewer than the host's: the store lost some, and the host sends them again."""
    replies: Many[StoredReply] = ()


class RepliesReply(WireMessage, frozen=True, tag="replies"):
    """Broker -> host: what is new to it in its conversations."""

    conversations: Many[Replies]
    since: Text = ""
    """As in `CallsReply`."""


class End(MessagePart, frozen=True):
    """A reward, or the end of a conversation, or both."""

    task_id: Id
    ticket: Id
    heard: Stamp = 0
    """As in `Hear`; if the store does not have this reply, the conversation is lost: GONE."""
    why: Ending = ""
    number: Id = 0
    """Call that the reward is for; 0 = the whole conversation."""
    order: Id = 0
    """The reward of a call with the highest order before the end counts."""
    reward: Real | None = None
    parts: Annotated[dict[Text, Real], Meta(max_length=MAX_PARTS)] = field(default_factory=dict)
    text: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    """Reason for people, such as the agent's last output."""


class EndRequest(WireMessage, frozen=True, tag="end"):
    """Host -> broker: rewards and ends."""

    ends: Lines[End]


ConversationMessage: TypeAlias = (
    WantRequest
    | ListenRequest
    | CallsReply
    | SayRequest
    | TakeRequest
    | TakeReply
    | CallRequest
    | RepliesRequest
    | RepliesReply
    | EndRequest
)
