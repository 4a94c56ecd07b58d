"""World of a random history: its participants, and the promises made to each.

Everything but the clock comes from the seed, no choice depends on the clock or on the order of a
set, and leases expire when the history says so: a seed that fails once fails again. What an actor
generates names its task, fence, position and version, so a record tells how its tokens were made.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

import redis

from buffer import operations
from buffer.client.scripts import LoadScript
from buffer.operations.keys import run_prefix
from buffer.operations.operation import Operation
from buffer.store import Store

T = TypeVar("T")

GROUP_SIZE = 3
MIN_GROUP_SIZE = 2
UNITS_PER_BATCH = 3
MAX_POLICY_LAG = 1
MARGIN = 1.5
MAX_ATTEMPTS = 2
TURN_TOKENS = 2
TTL_MS = 10**8  # nothing expires by itself
SCORE = b" scored"  # what a teacher appends to a record
CAP = (MAX_POLICY_LAG + 1) * UNITS_PER_BATCH * MARGIN


@dataclass
class Held:
    """An actor's view of one lease."""

    task: int
    fence: int
    tokens: list[str]
    sent: int
    """Tokens that the actor believes the store has."""
    talks: bool
    """Whether a live agent makes its turns."""

    calls: list[bytes] = field(default_factory=list)
    """Bodies of its agent's calls."""
    said: int = 0
    """Turns that were said; each is `TURN_TOKENS` long."""
    ticket: int = 0
    is_over: bool = False
    """Its agent has ended."""

    @property
    def target(self) -> int:
        """Length of the finished episode."""
        return length_of(self.task, talks=self.talks)

    @property
    def is_finished(self) -> bool:
        """Whether it can be submitted."""
        return self.is_over if self.talks else len(self.tokens) == self.target

    def record(self) -> bytes:
        """What it submits."""
        return " ".join(self.tokens).encode()


@dataclass
class Actor:
    """One incarnation."""

    name: str
    version: tuple[int, int]
    held: dict[int, Held] = field(default_factory=dict)


@dataclass
class Teacher:
    """One incarnation of a teacher."""

    name: str
    incarnation: str
    held: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Task -> fence and record."""


@dataclass
class Agent:
    """An agent of one conversation: what it called and heard."""

    task: int
    ticket: int
    bodies: list[bytes] = field(default_factory=list)
    heard: dict[int, bytes] = field(default_factory=dict)
    newest: int = 0
    """Stamp of the newest reply that it has heard."""

    @property
    def turns(self) -> int:
        """Calls until it ends."""
        return turns_of(self.task)

    @property
    def history(self) -> bytes:
        """Body of its next call, up to the question."""
        return b"".join(self.heard.values())


@dataclass
class Host:
    """One life of a host of agents."""

    name: str
    agents: dict[int, Agent] = field(default_factory=dict)
    newest: int = 0
    """Newest ticket that it knows."""


@dataclass
class Learner:
    """One life of the learner, and what its checkpoint would bring back."""

    lineage: int
    owner: str
    trained: list[list[int]] = field(default_factory=list)
    """Tasks of each batch, in order."""
    checkpoint: list[list[int]] = field(default_factory=list)
    sealed: dict[int, list[int]] = field(default_factory=dict)
    again: list[list[int]] = field(default_factory=list)
    """Units that each batch reused."""
    drawn: dict[int, list[int]] = field(default_factory=dict)
    """Units that each sealed batch reuses."""
    known: dict[int, set[int]] = field(default_factory=dict)
    """Units that each claimed batch has, as far as it was told."""

    @property
    def step(self) -> int:
        """Batches trained in its history."""
        return len(self.trained)


@dataclass
class Promises:
    """What the store has said and must keep, unless it is declared to have lost writes."""

    holder: dict[int, int] = field(default_factory=dict)
    """Task -> the last fence granted."""
    acked: set[int] = field(default_factory=set)


class World:
    """One run in one store, with a learner and three actors."""

    def __init__(self, url: str, seed: int, scripts: LoadScript) -> None:
        """Begin the run with its first learner."""
        self.rng = random.Random(seed)
        self.has_agents = seed % 2 == 0  # whose moves are many, and leave fewer for all others
        self.has_teachers = seed % 3 == 0
        self.client = redis.Redis.from_url(url)
        self.client.flushdb()
        self.store = Store(url, "history", scripts=scripts)
        self.prefix = run_prefix("history")
        self.store.run(
            operations.begin_run(
                "c",
                {},
                units_per_batch=UNITS_PER_BATCH,
                max_policy_lag=MAX_POLICY_LAG,
                margin=MARGIN,
                group_size=GROUP_SIZE,
                min_group_size=MIN_GROUP_SIZE,
            )
        )
        self.server = self.store.server_run_id()
        lineage = self.store.run(operations.begin_lineage(0, 0, owner="first"))
        assert lineage == 1
        self.learner = Learner(lineage, "first")
        self.forks = {lineage: 0}
        self.actors = [Actor(f"actor-{i}", (lineage, 0)) for i in range(3)]
        self.zombies: list[Actor] = []
        self.teachers = [Teacher(f"teacher-{i}", f"t-{i}") for i in range(2)]
        self.zombie_teachers: list[Teacher] = []
        self.hosts = [Host("host-0"), Host("host-1")]
        self.zombie_hosts: list[Host] = []
        self.tickets: dict[int, int] = {}
        """Task -> the newest ticket that was good; a rewind may take it back."""
        self.said: dict[tuple[int, int], list[str]] = {}
        """Task and ticket -> all that its agent has heard."""
        self.answers_early = False
        """An actor's bug: it says replies before it stores their tokens."""
        self.old_lineages: list[int] = []
        self.late: list[Operation[object]] = []
        self.promises = Promises()
        self.highest: dict[int, int] = {}
        """Task -> the highest fence ever granted; no rewind takes this back."""
        self.reconciled: set[int] = set()
        """Units whose records a rewind may have taken."""
        self.dropped: Counter[str] = Counter()
        self.created = 0
        """Units."""
        self.rewinds = self.begun_anew = 0
        self.recovering = self.in_grace = False
        self.faults = 1.0

    def close(self) -> None:
        """Close both clients."""
        self.store.close()
        self.client.close()

    def chance(self, probability: float) -> bool:
        """Decide whether a fault happens now."""
        return self.rng.random() < probability * self.faults

    def tell(self, operation: Operation[T]) -> T:
        """Run an operation of the learner; now and then the reply is lost and it asks again."""
        answer = self.store.run(operation)
        if self.chance(0.05):
            self.store.run(operation)
        return answer

    def talks(self, task: int) -> bool:
        """Whether a live agent makes the turns of a task."""
        return self.has_agents and task % 4 == 1

    def teacher_of(self, task: int) -> str:
        """Name of the teacher that scores a task; empty = none."""
        return f"teacher-{task % 2}" if self.has_teachers else ""

    def lag(self, version: tuple[int, int], step: int) -> int:
        """Count the batches by which tokens are behind, abandoned branches included."""
        lineage, k = version
        fork = min([k, *(at for later, at in self.forks.items() if later > lineage)])
        return max(0, step - fork) + (k - fork)


def length_of(task: int, *, talks: bool) -> int:
    """Length of a task's finished episode."""
    return TURN_TOKENS * turns_of(task) if talks else 2 + task % 7


def turns_of(task: int) -> int:
    """Calls that a task's agent makes before it ends."""
    return 1 + task % 3


def units_of(tasks: list[int]) -> list[int]:
    """Name the units of a batch, in its order."""
    return list(dict.fromkeys(task // GROUP_SIZE for task in tasks))
