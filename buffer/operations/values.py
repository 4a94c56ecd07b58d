"""Arguments and results of the store's operations.

Producer: `operations/`. Consumers: the broker, the learner, the console.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from buffer.record.episode import PolicyVersion


def actor_name(incarnation: str, tag: str) -> str:
    """Name an actor among those seen: under another key the same incarnation is another actor."""
    return f"{incarnation}\n{tag}"


MAX_LINEAGE = 2**20
NEWEST = MAX_LINEAGE * 2**32  # no version has a higher number


def holder_of(tag: str) -> str:
    """Return who answers for a key, by its tag: the enrolment key that registered it, or itself."""
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
    """Under which the chunk's first token was made."""
    last_fence: int = 0


class SubmitLine(NamedTuple):
    """A finished episode: the record of a lease."""

    task_id: int
    fence: int
    record: bytes
    key: str = ""
    """Tag of the sender's key."""
    oldest: int = NEWEST
    """Number of the oldest version in it."""


class BeatVerdict(NamedTuple):
    """OK, GAP, DUP, STALE, GONE or TAKEN (STALE, by its holder's fault); the tokens stored."""

    verdict: str
    length: int


class ClaimedUnit(NamedTuple):
    """A unit of a batch with its finished tasks."""

    group_id: int
    task_ids: list[int]


class Claim(NamedTuple):
    """What batch k holds at present."""

    sealed: bool
    complete: bool
    """It has as many units as the caller wanted, or is sealed."""
    starts: int
    """Lives of the learner that began with it since it was last trained."""
    units: list[ClaimedUnit]
    """Oldest first; of an incomplete batch only those that are new to the caller."""


class Rating(NamedTuple):
    """How a unit is to be kept for reuse. Producer: the learner, when it seals the batch."""

    group_id: int
    uses: int
    """How often it may be trained again."""
    born: int
    """Batches that the policy of its oldest trained token had seen."""
    rank: float
    """Its place in the order of sampling: lower comes first."""


class ReusedUnit(NamedTuple):
    """A kept unit that a batch has drawn."""

    group_id: int
    uses: int
    """How often it was trained again before."""
    task_ids: tuple[int, ...]


class EvalRound(NamedTuple):
    """Counts of an evaluation round so far, and the records that were asked for."""

    unfinished: int
    failed: int
    done: int
    records: dict[int, bytes]


class Memory(NamedTuple):
    """Redis' memory, and the run's share of it."""

    used_bytes: int
    limit_bytes: int
    """`maxmemory`; 0 = none."""
    run_bytes: int = 0
    """Of the run's records and unfinished completions, where they were asked for."""

    @property
    def share(self) -> float:
        """Used share of the limit; 0 without a limit."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


class SuspendedKey(NamedTuple):
    """A key that is granted nothing."""

    left_s: float
    why: str


class Closed(NamedTuple):
    """To whom nothing is leased."""

    paused: str
    """Why nobody gets leases; empty while they do."""
    keys: dict[str, SuspendedKey]
    """By their tags, or those of their holders."""

    def has(self, tag: str) -> bool:
        """Return whether a key is suspended, alone or with all keys of its holder."""
        return tag in self.keys or holder_of(tag) in self.keys


LEFT = "left"
"""Field of an actor that has drained and said so; one that is silent without it has died."""


class ActorSeen(NamedTuple):
    """An actor's last sign of life."""

    incarnation: str
    silent_s: float
    fields: dict[str, str]

    @property
    def has_left(self) -> bool:
        """Whether it took its leave."""
        return LEFT in self.fields

    def is_present(self, limit_s: float) -> bool:
        """Whether it gave a sign of life within so many seconds, and has not left since."""
        return self.silent_s <= limit_s and not self.has_left

    def figure(self, name: str) -> float:
        """Read a figure that it has sent; 0 where it has sent none."""
        try:
            return float(self.fields.get(name, 0.0))
        except ValueError:
            return 0.0


class TaskSeen(NamedTuple):
    """A task as it is at this moment. Consumer: `nyala chaos`."""

    task_id: int
    state: str
    """R(eady), L(eased), D(one), X (dead)."""
    fence: int
    incarnation: str
    """Its last holder; empty before the first."""
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
    """Failures that led here, of both kinds."""
    length: int
    """Tokens of its unfinished completion that it keeps."""


class DeadTask(NamedTuple):
    """A dead letter with all that it keeps."""

    letter: DeadLetter
    incarnation: str
    """Its last holder."""
    spec: bytes
    record: bytes | None
    """Its finished episode, if the batch that it was in was given up."""
    chunks: list[bytes]
    """Its unfinished completion."""


class WaitingUnit(NamedTuple):
    """A complete unit that no batch has claimed."""

    group_id: int
    num_bytes: int
    """Of its records."""
    task_ids: list[int]


class Publication(NamedTuple):
    """Where the current weights are: version, and `digest`, `endpoint`, `public_key`."""

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
    """Submitted and not claimed, the waiting members of open units included."""
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
    """Of the dead, those whose letters were deleted."""
    kept_units: int = 0
    """Committed, kept for reuse, and in no batch."""
    reused_units: int = 0
    """Committed, and in a batch for one more time."""
    vocabulary: int | None = None
    """Tokens of the policy's model; None before a learner has begun."""
    kept_bytes: int = 0
    """Records of kept units, those in a batch included."""
    data_failures: int = 0
    """Attempts at a task that reward or environment have failed since the run began."""
    data_failure: str = ""
    """Why the newest of them failed."""

    @property
    def by_state(self) -> dict[str, int]:
        """Tasks in each state, from the first to the last of a task's life."""
        made = {"ready": self.ready, "leased": self.leased, "buffered": self.buffered}
        trained = {"claimed": self.claimed, "committed": self.committed}
        lost = {"dropped": sum(self.dropped.values()), "dead": self.dead}
        return made | trained | lost | {"cancelled": self.cancelled}

    @property
    def accounted(self) -> int:
        """Tasks found in some state; equal to `created`, or a task was lost."""
        return sum(self.by_state.values())
