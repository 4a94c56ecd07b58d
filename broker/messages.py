"""The messages between an actor and the broker, and between an actor and the weight publisher.

One ZeroMQ frame = one msgpack map {v, run, inc, seq, op, ...fields of the struct}. A reply has the
same `seq`. Every struct names its producer and consumer; `codec.py` turns them into bytes and
validates both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from buffer.episode import PolicyVersion

WIRE_VERSION = 1
RECORD_MARGIN = 64 * 1024
"""Bytes of a message beside its records: the header, and what a submission says of each."""


class Verdict(StrEnum):
    """What the store answered for one task."""

    OK = "OK"
    DUP = "DUP"
    """Already done under this fence: as good as OK."""
    STALE = "STALE"
    """Another fence owns the task: abort the request at once."""
    GONE = "GONE"
    """The store does not know the task."""
    GAP = "GAP"
    """A chunk went missing: send again from `length`."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What to make; tens of bytes. Producer: the learner's curriculum. Consumer: actors."""

    group_id: int
    index: int
    """Which item of the environment."""
    seed: int
    purpose: str
    """`train` or `eval`."""
    temperature: float
    """0 = greedy."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A task granted to one actor. Producer: broker. Consumer: actor."""

    task_id: int
    fence: int
    spec: TaskSpec
    length: int
    """Tokens already in the store."""
    chunks: tuple[bytes, ...] = ()
    """Encoded `Completion` chunks, in order, that together have `length` tokens."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Where the current weights are. Producer: learner, through the store. Consumer: actors."""

    version: PolicyVersion
    digest: str
    endpoint: str
    """The publisher's ZeroMQ address."""
    public_key: str
    """The publisher's CURVE public key (z85)."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Actor -> broker, first message of an incarnation."""

    incarnation: str
    host: str
    pid: int
    hashes: dict[str, str]
    """`settings`, `environment`, `reward`: a difference from the run's is refused by name."""
    capacity: int
    """Episodes at a time."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Broker -> actor, answer to HELLO."""

    run_id: str
    lease_timeout_s: float
    publication: Publication | None
    long_poll_s: float = 2.0
    """Longest time a LEASE waits for work before its answer."""
    max_message_bytes: int = 32 * 2**20
    """Largest message the broker takes; a longer one would cut the connection without a word."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Actor -> broker: at most `n` tasks for an engine at `version`; waits up to the long poll."""

    n: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Broker -> actor. `status` is OK, WAIT (no admission now), EMPTY or DONE (the run ended)."""

    status: str
    leases: tuple[Lease, ...]
    publication: Publication | None
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Beat:
    """A line of a heartbeat: the lease lives; with `chunk`, it has these tokens from `offset`."""

    task_id: int
    fence: int
    offset: int = 0
    num_tokens: int = 0
    chunk: bytes = b""


@dataclass(frozen=True, slots=True)
class BeatRequest:
    """Actor -> broker every `actors.heartbeat_s`; an empty one still says that the actor lives."""

    beats: tuple[Beat, ...]
    version: PolicyVersion
    stats: dict[str, float] = field(default_factory=dict)
    """Figures for `nyala status`, such as tokens_per_s."""


@dataclass(frozen=True, slots=True)
class TaskVerdict:
    """The store's answer for one task; `length` is its authoritative number of tokens."""

    task_id: int
    verdict: Verdict
    length: int = 0


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Broker -> actor: one verdict for each line, in order."""

    verdicts: tuple[TaskVerdict, ...]
    publication: Publication | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A finished episode as encoded record bytes."""

    task_id: int
    fence: int
    record: bytes


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Actor -> broker: finished episodes; acknowledged only after the store has them."""

    submissions: tuple[Submission, ...]


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """Actor -> broker: leases given back while draining; final chunks go in a BEAT before it."""

    tasks: tuple[tuple[int, int], ...]
    """(task_id, fence). None at all: this actor is about to leave and is granted nothing more; the
    answer comes after whatever it was granted before."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An episode that was not made; `kind` is `data` (reward, environment) or `infrastructure`."""

    task_id: int
    fence: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class FailRequest:
    """Actor -> broker."""

    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Bye:
    """Actor -> broker: this incarnation ends; it holds no leases."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Observer or operator -> broker: how is the run?"""


@dataclass(frozen=True, slots=True)
class StatusReply:
    """Broker -> observer or operator."""

    state: str
    version: int
    """Batches trained."""
    tasks: dict[str, int]
    """Tasks by state."""
    actors: tuple[str, ...]
    """Incarnations that this broker serves."""
    refusals: dict[str, int]
    """What this broker has refused since it started, by code."""


@dataclass(frozen=True, slots=True)
class RevokeRequest:
    """Operator -> broker: take the key of this name off the broker's allow-list."""

    name: str


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Operator -> broker: this incarnation gets no more work, finishes what it has and leaves."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """Broker -> operator: it is done; `text` is for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Broker -> peer: the message changed nothing. `code` is for programs, `text` for people."""

    code: str
    text: str
