"""Messages between the broker and its actors, observers and operators.

A reply has the `seq` of its request. Every struct names its producer and consumer; `codec.py` turns
them into bytes and back, and refuses anything that is not of these types.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field

from buffer.operations.leases import MAX_CHUNKS
from buffer.record.episode import PolicyVersion

from .fields import Endpoints, Item, Many, MessagePart, Named, Real, Text, Whole, WireMessage

MAX_LINES = 4096
"""Tasks in one message; four times the most an actor generates at a time by default."""
MAX_ABANDONED = 32
"""Calls that a client has at a time."""
MAX_REASON = 2_000  # characters of a failure's: a traceback's end, kept for each dead letter
MAX_SEEN = 256  # actors in a status: more than anybody reads, in some 80 KB
MAX_RUN_SNAPSHOT = 64 * 1024  # bytes, as the learner writes it

Id = Annotated[int, Meta(ge=0, le=2**53 - 1)]  # of a task, or a fence: a double in Lua
Lines = Annotated[tuple[Item, ...], Meta(max_length=MAX_LINES)]


class Verdict(StrEnum):
    """The store's answer for one task."""

    OK = "OK"
    DUP = "DUP"
    """Already done under this fence: as good as OK."""
    OUTDATED = "STALE"
    """The lease has ended: the task was leased again under another fence, or was taken back because
    the lease was too slow, too large, or brought tokens of older weights than its own. The actor
    aborts the request at once."""
    GONE = "GONE"
    """The store has no such task, or the task has ended."""
    GAP = "GAP"
    """A chunk or call is missing; the sender sends again from `length`, or the calls after it."""
    OTHER = "OTHER"
    """Another call or reply is stored under this number, or a call's parent is shorter."""
    UNCALLED = "UNCALLED"
    """The store has no such call, or no mailbox; the actor wants an agent again, and listens."""
    BUSY = "BUSY"
    """Too many calls of the conversation wait for replies; the host sends it again later."""
    FULL = "FULL"
    """The conversation has as many calls or bytes as it may."""
    ENDED = "ENDED"
    """The conversation has ended; the host makes no more calls."""


class TaskSpec(MessagePart, frozen=True):
    """Content of a task; tens of bytes. Producer: the learner's curriculum. Consumer: actors."""

    group_id: Whole
    index: Whole
    """Number of the item of the environment."""
    seed: Whole
    purpose: Text
    """`train` or `eval`."""
    temperature: Real
    """0 = greedy."""


class Lease(MessagePart, frozen=True):
    """A task granted to one actor. Producer: broker. Consumer: actor."""

    task_id: Whole
    fence: Whole
    spec: TaskSpec
    length: Whole
    """Tokens already in the store."""
    chunks: Annotated[tuple[bytes, ...], Meta(max_length=MAX_CHUNKS)] = ()
    """Encoded `Completion` chunks, in order, that together have `length` tokens; to a teacher the
    encoded `Episode` that it is to score, and nothing else."""


class Publication(MessagePart, frozen=True):
    """Where the current weights are. Producer: learner, through the store. Consumer: actors."""

    version: PolicyVersion
    digest: Text
    endpoint: Text
    """The publisher's ZeroMQ address."""
    public_key: Text
    """The publisher's CURVE public key (z85)."""


class Hello(WireMessage, frozen=True, tag="hello"):
    """Actor -> broker, first message of an incarnation."""

    incarnation: Text
    host: Text
    pid: Whole
    hashes: Named[Text]
    """`settings`, `environment`, `reward`: a difference from the run's is refused by name."""
    capacity: Whole
    """Episodes at a time."""
    teacher: Text = ""
    """Name of the teacher that this incarnation is: it scores finished episodes and makes none;
    empty = it is none."""


class Welcome(WireMessage, frozen=True, tag="welcome", omit_defaults=True):
    """Broker -> actor, answer to HELLO."""

    run_id: Text
    """Name of the run."""
    lease_timeout_s: Real
    publication: Publication | None
    """None = no weights are published yet."""
    long_poll_s: Real = 2.0
    """Longest time a LEASE waits for work before its answer."""
    max_message_bytes: Whole = 32 * 2**20
    """Largest message the broker takes; a longer one would cut the connection without a reply."""
    brokers: Endpoints = ()
    """Addresses of the run's brokers; empty = not known."""


class LeaseRequest(WireMessage, frozen=True, tag="lease"):
    """Actor -> broker: at most `n` tasks for an engine at `version`; waits up to the long poll."""

    n: Whole
    version: PolicyVersion
    abandoned: Annotated[tuple[Id, ...], Meta(max_length=MAX_ABANDONED)] = ()
    """Earlier requests that had no answer and are no longer waited for: leases that one of them was
    granted, and that are not renewed, are released without charging an attempt."""
    takes_over: bool = True
    """Whether it may get leases of other actors that do not work on them. False where a reward
    judges whole groups: a finished member that waits for its group would be taken from it."""
    begun_only: bool = False
    """Whether it is for tasks alone that an actor has given back or lost."""


class LeaseReply(WireMessage, frozen=True, tag="leases"):
    """Broker -> actor, answer to LEASE."""

    status: Text
    """OK, WAIT (nothing is admitted now), EMPTY (there is no task) or DONE (the run has ended, or
    this actor is drained)."""
    leases: Many[Lease]
    publication: Publication | None
    retry_after_s: Real = 0.0


class Beat(MessagePart, frozen=True):
    """A line of a heartbeat: the lease lives; with `chunk`, it has these tokens from `offset`."""

    task_id: Id
    fence: Id
    offset: Id = 0
    num_tokens: Id = 0
    chunk: bytes = b""


class Figures(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An actor's figures for `nyala status`. Producer: actors. No others can be sent."""

    tokens_per_s: Real = 0.0
    tokens: Real = 0.0
    busy_s: Real = 0.0
    in_flight: Real = 0.0
    unacked: Real = 0.0
    finished: Real = 0.0
    lost: Real = 0.0
    probe_mean: Real = 0.0
    probe_max: Real = 0.0
    """Mean and largest difference between engine and learner at the last swap of weights, nats."""
    weight_transfer_s: Real = 0.0
    weight_pause_s: Real = 0.0
    """Time from the last announcement to checked bytes, and pause of generation for its swap."""
    memory_bytes: Real = 0.0
    cores: Real = 0.0
    """Resident memory of the actor and its child processes, and the processor cores they use."""


class BeatRequest(WireMessage, frozen=True, tag="beat"):
    """Actor -> broker every `actors.heartbeat_s`; an empty one is a sign of life."""

    beats: Lines[Beat]
    version: PolicyVersion
    stats: Figures = Figures()


class TaskVerdict(MessagePart, frozen=True):
    """The store's answer for one task."""

    task_id: Whole
    verdict: Verdict
    length: Whole = 0
    """Tokens that the store has of the task, in the answer to a heartbeat; else 0."""


class Verdicts(WireMessage, frozen=True, tag="verdicts", omit_defaults=True):
    """Broker -> actor, answer to BEAT, SUBMIT, RELEASE, FAIL: one verdict a line, in order."""

    verdicts: Many[TaskVerdict]
    publication: Publication | None = None
    brokers: Endpoints = ()
    """As in `Welcome`, in the answer to a heartbeat."""


class Submission(MessagePart, frozen=True):
    """A finished episode: its lease and its encoded record (`buffer/record/codec.py`).

    From a teacher it is the record that came with the lease, with `teacher_logprobs`.
    """

    task_id: Id
    fence: Id
    record: bytes
    teacher: Text = ""
    """Name of the teacher that must score it before it can be trained; empty = none."""


class SubmitRequest(WireMessage, frozen=True, tag="submit"):
    """Actor -> broker: finished episodes; acknowledged only after the store has them."""

    submissions: Lines[Submission]


class ReleaseRequest(WireMessage, frozen=True, tag="release"):
    """Actor -> broker: leases given back while draining; final chunks go in a BEAT before it."""

    tasks: Lines[tuple[Id, Id]]
    """(task_id, fence). An empty list: this actor is about to leave and is granted nothing more;
    the answer comes after whatever it was granted before."""


FailureKind = Literal["data", "infrastructure"]
"""`data` = a failure of the reward or the environment."""


class Failure(MessagePart, frozen=True):
    """An episode that was not made."""

    task_id: Id
    fence: Id
    kind: FailureKind
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


class FailRequest(WireMessage, frozen=True, tag="fail"):
    """Actor -> broker: episodes that could not be made."""

    failures: Lines[Failure]


class Bye(WireMessage, frozen=True, tag="bye"):
    """Actor -> broker: this incarnation ends; it holds no leases. The answer is another Bye."""


class StatusRequest(WireMessage, frozen=True, tag="status"):
    """Observer or operator -> broker: request for the state of the run."""


class ActorState(MessagePart, frozen=True):
    """An actor's last sign of life, at any broker. Producer: broker. Consumer: `nyala top`."""

    incarnation: Text
    silent_s: Real
    fields: Named[Text]
    """Its host, version and figures."""


class StatusReply(WireMessage, frozen=True, tag="state"):
    """Broker -> observer or operator. No text that was sampled, and nothing secret."""

    state: Text
    version: Whole
    """Batches trained."""
    tasks: Named[Whole]
    """Tasks by state, and the number `created`."""
    actors: Many[Text]
    """Incarnations that this broker serves."""
    refusals: Named[Whole]
    """Refusals of this broker since it started, by code."""
    steps: Whole = 0
    """Batches of the whole run."""
    seen: Annotated[tuple[ActorState, ...], Meta(max_length=MAX_SEEN)] = ()
    """The actors heard of last, the newest first."""
    silent_after_s: Real = 0.0
    """Silence after which an actor counts as gone."""
    groups: Named[Whole] = field(default_factory=dict)
    """Groups that are `sampling`, `waiting` or `claimed`, and the number that is `admitted`."""
    memory: Real = 0.0
    """Used share of the store's memory; 0 without a limit."""
    closed: Many[Text] = ()
    """A pause of the run and the first suspended keys: a line with reason and remedy for each."""
    idle: Text = ""
    """Reason why no actor samples although the learner waits; empty while one does."""
    run_snapshot: Annotated[bytes, Meta(max_length=MAX_RUN_SNAPSHOT)] = field(
        default=b"", name="bulletin"
    )
    """What `learner/reporting/run_snapshot.py` wrote last; empty before the first."""


class RevokeRequest(WireMessage, frozen=True, tag="revoke"):
    """Operator -> broker: take the key of this name off the broker's allow-list."""

    name: Text


class DrainRequest(WireMessage, frozen=True, tag="drain"):
    """Operator -> broker: this incarnation gets no more work, finishes its leases and leaves."""

    incarnation: Text


class Enrol(WireMessage, frozen=True, tag="enrol"):
    """Holder of an enrolment key -> broker: allow the actor's key pair that it has just made."""

    public_key: Text


class Receipt(WireMessage, frozen=True, tag="receipt"):
    """Broker -> operator or enrolling actor: the request was carried out; `text` is for people."""

    text: Text


class Refusal(WireMessage, frozen=True, tag="refusal"):
    """Broker -> peer: the message changed nothing. `code` is for programs, `text` for people."""

    code: Text
    text: Text
    retry_after_s: Real = 0.0
    """Least pause before a request refused as `busy` or `store` is sent again, seconds."""


BrokerMessage: TypeAlias = (
    Hello
    | Welcome
    | LeaseRequest
    | LeaseReply
    | BeatRequest
    | Verdicts
    | SubmitRequest
    | ReleaseRequest
    | FailRequest
    | Bye
    | StatusRequest
    | StatusReply
    | RevokeRequest
    | DrainRequest
    | Enrol
    | Receipt
    | Refusal
)
