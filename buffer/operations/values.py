"""Arguments and results of the store's operations.

Producer: `operations/`. Consumers: the broker, the learner, the console.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from buffer.record.episode import PolicyVersion


def actor_name(incarnation: str, tag: str) -> str:
    """Return the name of an actor in the store: its incarnation with the tag of its key."""
    return f"{incarnation}\n{tag}"


MAX_LINEAGE = 2**20
NEWEST = MAX_LINEAGE * 2**32  # no version has a higher number


def holder_of(tag: str) -> str:
    """Return the holder of a key, by its tag: the enrolment key that registered it, or itself."""
    return tag.partition("~")[0]


def version_number(version: tuple[int, int]) -> int:
    """Return a number that orders versions, of lineage and step, and is exact in Lua."""
    lineage, step = version
    return min(lineage, MAX_LINEAGE) * 2**32 + min(step, 2**32 - 1)


class NewTask(NamedTuple):
    """A task to create. Producer: the learner's feeder."""

    task_id: int
    group_id: int
    spec: bytes
    eval_step: int | None = None
    """Evaluation round (the caller's lineage, this step); None = a training task."""


class LeasedTask(NamedTuple):
    """A task granted under a fence."""

    task_id: int
    fence: int
    spec: bytes
    length: int
    """Tokens already in the store, in `chunks`."""
    chunks: tuple[bytes, ...]


class LeaseAnswer(NamedTuple):
    """`status` is OK, WAIT (not admitted now), EMPTY (nothing to do) or DONE (run has ended)."""

    status: str
    tasks: list[LeasedTask]


class BeatLine(NamedTuple):
    """One lease to renew; with `num_tokens` > 0 it brings a chunk that starts at token `offset`."""

    task_id: int
    fence: int
    offset: int = 0
    num_tokens: int = 0
    chunk: bytes = b""
    key: str = ""
    """Tag of the sender's key."""
    oldest: int = NEWEST
    """Number of the oldest version in the chunk."""
    first_fence: int = 0
    """Fence of the chunk's first token."""
    last_fence: int = 0


class SubmitLine(NamedTuple):
    """A finished episode: the record of a lease."""

    task_id: int
    fence: int
    record: bytes
    key: str = ""
    """Tag of the sender's key."""
    oldest: int = NEWEST
    """Number of the oldest version in the record."""
    teacher: str = ""
    """Teacher that must score the record first, a name without blanks; empty = none."""


class BeatVerdict(NamedTuple):
    """OK, GAP, DUP, STALE, GONE or TAKEN (STALE, at its holder's fault), and the tokens stored."""

    verdict: str
    length: int


class TakenConversation(NamedTuple):
    """A conversation that a host has taken."""

    task_id: int
    ticket: int
    """The host's fence for the conversation."""
    spec: bytes
    payload: bytes
    """What the actor tells the agent."""


class TakeAnswer(NamedTuple):
    """`status` as in `LeaseAnswer`, or RESTS: agents of this host end without a call."""

    status: str
    tickets: list[TakenConversation]
    num_silent: int = 0
    """Agents of a host that rests, in a row, that have ended without a call."""
    rest_ms: int = 0
    """Time until it is given a conversation again."""


class CallLine(NamedTuple):
    """A call of an agent; its body is the first `keep` bytes of its parent's body, and `tail`."""

    task_id: int
    ticket: int
    number: int
    """Calls of a conversation are numbered from 1."""
    parent: int
    """Number of an earlier call; 0 = none, and `keep` is 0."""
    keep: int
    tail: bytes


class CallVerdict(NamedTuple):
    """OK, DUP, STALE, GONE, GAP, OTHER, BUSY, FULL or ENDED, and the calls stored."""

    verdict: str
    num_calls: int


class SayLine(NamedTuple):
    """A reply to a call, with the chunk that holds its last tokens."""

    beat: BeatLine
    ticket: int
    """Ticket of the conversation that the actor has read the call from."""
    number: int
    turn_end: int
    """Tokens of the log up to the end of its turn; 0 = an error, which has no turn."""
    reply: bytes


class ListenLine(NamedTuple):
    """A task whose actor waits for calls."""

    task_id: int
    fence: int
    ticket: int = 0
    """Ticket of the conversation that the actor has read from; 0 = it has read nothing."""
    num_calls: int = 0
    """Calls that the actor has."""
    num_said: int = 0
    """Replies that the actor knows to be stored."""


class MailboxCall(NamedTuple):
    """A call as it is stored."""

    parent: int
    keep: int
    tail: bytes
    is_answered: bool


class CallsAnswer(NamedTuple):
    """Calls of a conversation after those that its actor has."""

    verdict: str
    """OK, DUP, STALE, GONE, or UNCALLED: the task has no mailbox."""
    ticket: int = 0
    """0 = no host has taken the conversation."""
    num_calls: int = 0
    """Calls stored; more than the actor's and these where they exceed one answer."""
    why: str = ""
    """Why the conversation has ended; empty = it goes on."""
    rewards: Mapping[int, bytes] = {}
    """Rewards by number of a call, 0 = the whole; empty before the end."""
    calls: tuple[MailboxCall, ...] = ()


class ReplyLine(NamedTuple):
    """A conversation whose host waits for replies."""

    task_id: int
    ticket: int
    heard: int = 0
    """Stamp of the newest reply that the agent has heard; 0 = none."""


class MailboxReply(NamedTuple):
    """A reply as it is stored."""

    stamp: int
    """Higher than those of earlier replies of the conversation."""
    number: int
    reply: bytes


class RepliesAnswer(NamedTuple):
    """Replies of a conversation after the newest that its agent has heard."""

    verdict: str
    """OK, STALE or GONE."""
    num_calls: int
    """Calls stored; fewer than the host has made where the store has lost some."""
    replies: tuple[MailboxReply, ...]


class EndLine(NamedTuple):
    """A reward of a conversation, or its end, or both."""

    task_id: int
    ticket: int
    heard: int = 0
    """Stamp of the newest reply that the agent has heard; 0 = none."""
    why: str = ""
    """Why it ends; empty = it goes on."""
    number: int = 0
    """Call that the reward is for; 0 = the whole conversation."""
    order: int = 0
    """The reward of a call with the highest order counts."""
    reward: bytes = b""
    """Empty = none."""


class News(NamedTuple):
    """What has changed in the conversations of a run."""

    newest: int
    """Number of the newest change."""
    wanted: int
    """Conversations that no host has taken."""
    tasks: list[int]
    """Tasks whose conversations have changed since."""


class ClaimedUnit(NamedTuple):
    """A unit of a batch with its finished tasks."""

    group_id: int
    task_ids: list[int]


class StaleMask(NamedTuple):
    """Tokens that a sealed batch does not train, by their lag. Producer and consumer: the learner.

    It is sealed with the batch, so that a replay masks the same tokens: a later lineage would count
    other lags, and settings may change between two lives of the learner.
    """

    lineage: int
    """Lineage that sealed the batch, in which lags are counted."""
    max_lag: int
    """Largest lag of a trained token of new units, batches."""
    reused_max_lag: int
    """The same of reused units, batches."""


class Claim(NamedTuple):
    """The units of batch k at present."""

    sealed: bool
    complete: bool
    """The batch has as many units as the caller wanted, or is sealed."""
    starts: int
    """Lives of the learner that began with the batch since it was last trained."""
    units: list[ClaimedUnit]
    """Its units, oldest first; of an incomplete batch only those that are new to the caller."""
    mask: StaleMask | None = None
    """The mask that it was sealed with, if any."""


class Rating(NamedTuple):
    """Rating of a unit that is kept for reuse. Producer: the learner, when it seals the batch."""

    group_id: int
    uses: int
    """Times that it may be trained again."""
    born: int
    """Batches that the policy of its oldest trained token had seen."""
    rank: float
    """Its place in the order of sampling; the lowest comes first."""


class ReusedUnit(NamedTuple):
    """A kept unit that a batch has drawn."""

    group_id: int
    uses: int
    """Times that it was trained again before."""
    task_ids: tuple[int, ...]


class EvalRound(NamedTuple):
    """Counts of an evaluation round so far, and the records that were asked for."""

    unfinished: int
    failed: int
    done: int
    records: dict[int, bytes]


class RedisMemory(NamedTuple):
    """Redis' memory, and the run's share of it."""

    used_bytes: int
    limit_bytes: int
    """`maxmemory`; 0 = none."""
    run_bytes: int = 0
    """Bytes of the run's records and unfinished completions, if they were asked for."""

    @property
    def share(self) -> float:
        """Used share of the limit; 0 without a limit."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


class SuspendedKey(NamedTuple):
    """A key that gets no leases for a while."""

    left_s: float
    why: str


class LeasingPauses(NamedTuple):
    """A pause of the run, and suspended keys."""

    paused: str
    """Reason of a pause, in which no actor gets leases; empty = no pause."""
    keys: dict[str, SuspendedKey]
    """Suspended keys by their tags, or by those of their holders."""

    def has(self, tag: str) -> bool:
        """Return whether a key is suspended, alone or with all keys of its holder."""
        return tag in self.keys or holder_of(tag) in self.keys


LEFT = "left"
"""Field of an actor that has drained and left; a silent actor without it has died."""


TEACHER = "teacher"
"""Field of an actor that scores finished episodes and makes none: the name of the teacher."""


class ActorSeen(NamedTuple):
    """An actor's or a teacher's last sign of life."""

    incarnation: str
    silent_s: float
    fields: dict[str, str]

    @property
    def has_left(self) -> bool:
        """Whether the actor has reported its end."""
        return LEFT in self.fields

    @property
    def teacher(self) -> str:
        """Name of the teacher that it is; empty = an actor, which samples."""
        return self.fields.get(TEACHER, "")

    def samples(self, limit_s: float) -> bool:
        """Whether it is present and no teacher."""
        return not self.teacher and self.is_present(limit_s)

    def is_present(self, limit_s: float) -> bool:
        """Whether the actor gave a sign of life within `limit_s`, and has not left since."""
        return self.silent_s <= limit_s and not self.has_left

    def figure(self, name: str) -> float:
        """Return a figure that the actor has sent, or 0."""
        try:
            return float(self.fields.get(name, 0.0))
        except ValueError:
            return 0.0


class TaskSeen(NamedTuple):
    """The present state of a task. Consumer: `nyala chaos`."""

    task_id: int
    state: str
    """R(eady), L(eased), D(one), X (dead)."""
    fence: int
    incarnation: str
    """Incarnation of its last holder; empty before the first."""
    length: int
    """Tokens of its unfinished completion that the store has."""
    attempts: int
    """Attempts charged since it last made progress."""


class DeadLetter(NamedTuple):
    """A task that is not tried any more."""

    task_id: int
    died_at_ms: int
    """Redis' clock, Unix ms."""
    why: str
    attempts: int
    """Failures of both kinds that led to its death."""
    length: int
    """Tokens of its unfinished completion."""


class DeadTask(NamedTuple):
    """A dead letter with its spec, record and chunks."""

    letter: DeadLetter
    incarnation: str
    """Incarnation of its last holder."""
    spec: bytes
    record: bytes | None
    """Its finished episode, if its batch was abandoned."""
    chunks: list[bytes]
    """Its unfinished completion."""


class WaitingUnit(NamedTuple):
    """A complete unit that no batch has claimed."""

    group_id: int
    num_bytes: int
    """Bytes of its records."""
    task_ids: list[int]


class StoredPublication(NamedTuple):
    """The published weights: version, and `digest`, `endpoint`, `public_key`."""

    version: PolicyVersion
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class ClaimCounts:
    """One claim in the statistics."""

    k: int
    units: int
    sealed: bool
    starts: int


@dataclass(frozen=True, slots=True)
class EvalCounts:
    """Evaluation tasks of the open rounds."""

    ready: int
    leased: int
    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class Stats:
    """State of a run; tasks are counted from the sets that hold them, so no count can drift."""

    state: str
    """RUNNING, PAUSED, RECOVERING or ENDED."""
    lineage: int
    version: int
    """Batches trained in this lineage's history."""
    committed_step: int
    """Newest batch inside a durable checkpoint."""
    hashes: dict[str, str]
    created: int
    ready: int
    leased: int
    buffered: int
    """Tasks submitted and not claimed, including waiting members of open units."""
    claimed: int
    committed: int
    dropped: dict[str, int]
    dead: int
    cancelled: int
    new_units: int
    open_units: int
    buffered_units: int
    claims: tuple[ClaimCounts, ...]
    eval: EvalCounts
    purged: int = 0
    """Dead tasks whose letters were deleted."""
    kept_units: int = 0
    """Committed units that are kept for reuse, and in no batch."""
    reused_units: int = 0
    """Committed units that are in a batch for one more time."""
    vocabulary: int | None = None
    """Tokens of the policy's model; None before a learner has begun."""
    kept_bytes: int = 0
    """Bytes of records of kept units, including those in a batch."""
    data_failures: int = 0
    """Attempts at tasks that failed in reward or environment since the run began."""
    data_failure: str = ""
    """Reason of the newest of these failures."""
    unscored: Mapping[str, int] = field(default_factory=dict)
    """Finished tasks that wait for their score, by teacher."""
    scoring: int = 0
    """Finished tasks that teachers have leased."""
    wanted: int = 0
    """Conversations that no host has taken."""
    wanted_s: float = 0.0
    """Time for which the first of them has waited."""
    hosted: int = 0
    """Conversations that hosts have, and that have not ended."""
    hosts: int = 0
    """Hosts that have one of them, on whatever machine."""

    @property
    def by_state(self) -> dict[str, int]:
        """Tasks in each state, from the first to the last of a task's life."""
        sampled = {"ready": self.ready, "leased": self.leased}
        sampled |= {"unscored": sum(self.unscored.values()) + self.scoring}
        sampled |= {"buffered": self.buffered}
        trained = {"claimed": self.claimed, "committed": self.committed}
        lost = {"dropped": sum(self.dropped.values()), "dead": self.dead}
        return sampled | trained | lost | {"cancelled": self.cancelled}

    @property
    def accounted(self) -> int:
        """Number of tasks in all states; equal to `created` unless a task was lost."""
        return sum(self.by_state.values())
