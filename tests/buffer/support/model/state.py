"""What the store holds, in Python's own terms, and the moves of tasks and units between places.

    unit:  new -> open -> buffer -> claim of batch k -> committed       or dropped, cancelled
    task:  R(eady) <-> L(eased) -> D(one)                               or X (dead letter)

This package is the specification of `buffer/lua`: one function per operation, which changes the
model and returns the reply that the store must give. It shares no code with what it judges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from buffer.operations.keys import EVAL_BASE
from buffer.operations.values import StaleMask

RESUMED = -1
"""Place of a resumed task among the ready ones: ahead of all that nobody has begun."""


RECENT_TASKS, MOST_DEATHS = 1000, 10


class Refused(Exception):
    """The store answers with this error, and nothing has changed."""


@dataclass(frozen=True)
class Limits:
    """What the run began with."""

    group_size: int = 3
    min_group_size: int = 2
    units_per_batch: int = 3
    max_policy_lag: int = 1
    margin: float = 1.5
    max_chunks: int = 3
    max_calls: int = 4
    max_open_calls: int = 2
    units_per_call: int = 1
    """That CLAIM moves at once."""


@dataclass
class Task:
    """A task of a unit that was begun, or of an evaluation round."""

    spec: bytes | None
    state: str = "R"
    fence: int | None = None
    holder: str | None = None
    key: str | None = None
    """Tag of its holder's key."""
    failed_by: list[str] = field(default_factory=list)
    """Tag of the key of each failure as data."""
    lost_by: list[str] = field(default_factory=list)
    """Of each attempt since the last progress."""
    deadline_ms: int = 0
    place: int = RESUMED
    """Among the ready."""
    length: int | None = None
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int | None = None
    """Of its chunks."""
    last_fence: int | None = None
    """That it has tokens of."""
    num_bytes_given: int | None = None
    """Of its chunks when it was leased last; None if that began its unit."""
    length_given: int | None = None
    """Of its tokens then."""
    oldest: tuple[int, int] | None = None
    """Version of its tokens at least."""
    progress_ms: int | None = None
    attempts: int | None = None
    length_charged: int | None = None
    failures: int | None = None
    losses: int | None = None
    """Conversations that were lost."""
    losses_by: list[str] = field(default_factory=list)
    """Tag of the key that each is laid to."""
    why: str | None = None
    died_ms: int = 0
    record: bytes | None = None
    kept_record: bool | None = None
    """Whether it became a dead letter together with its record."""
    is_reconciled: bool = False
    round: tuple[int, int] | None = None
    teacher: str | None = None
    """It is finished and must be scored."""
    made: tuple[int, str] | None = None
    """Fence and key of the actor whose record must be or was scored."""


@dataclass
class Conversation:
    """A task's conversation with a live agent."""

    payload: bytes
    wanted_ms: int
    ticket: int | None = None
    host: str = ""
    key: str = ""
    deadline_ms: int = 0
    """Of the ticket."""
    calls: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Parent, bytes kept of its body, and tail."""
    replies: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Number of a call -> stamp and reply, the oldest first."""
    opened_ms: int | None = None
    why: str | None = None
    rewards: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Number of a call -> order and reward."""
    news: int = 0
    """Number of its last change."""

    @property
    def num_bytes(self) -> int:
        """Of all that it holds."""
        replies = sum(len(reply) for _, reply in self.replies.values())
        calls = sum(len(tail) for *_, tail in self.calls)
        return len(self.payload) + calls + replies + self.num_reward_bytes

    @property
    def num_reward_bytes(self) -> int:
        """Of its rewards, with their orders."""
        return sum(len(b"%d %s" % reward) for reward in self.rewards.values())

    @property
    def num_open(self) -> int:
        """Calls without a reply."""
        return len(self.calls) - len(self.replies)

    @property
    def newest(self) -> int:
        """Stamp of the newest reply."""
        return max((stamp for stamp, _ in self.replies.values()), default=0)

    def body(self, number: int) -> bytes:
        """The whole body of a call."""
        if number == 0:
            return b""
        parent, keep, tail = self.calls[number - 1]
        return self.body(parent)[:keep] + tail


@dataclass
class HostOfAgents:
    """What the store remembers of a host."""

    ticket: int | None = None
    tasks: list[int] = field(default_factory=list)
    """Taken under its newest ticket."""
    num_silent: int | None = None
    """Agents in a row that ended without a call."""
    rests_until_ms: int | None = None


@dataclass
class Claim:
    """Batch k: its units by order of arrival, and how they are rated for reuse once sealed."""

    units: dict[int, int] = field(default_factory=dict)
    is_sealed: bool = False
    mask: StaleMask | None = None
    starts: int | None = None
    ratings: dict[int, tuple[int, int, float]] = field(default_factory=dict)

    def in_order(self) -> list[int]:
        """Its units, the oldest first."""
        return by_age(self.units)


def by_age(units: Mapping[int, int]) -> list[int]:
    """Sort units by their ages; as in Redis, those of one age by their names."""
    return sorted(units, key=lambda unit: (units[unit], str(unit)))


@dataclass
class Kept:
    """A committed unit that may be trained again."""

    tasks: dict[int, bytes | None]
    """With their records, unless a rewind took them."""
    most: int
    born: int
    rank: float
    uses: int = 0
    batch: int | None = None
    """That has drawn it."""

    @property
    def num_bytes(self) -> int:
        """Of its records."""
        return sum(len(record or b"") for record in self.tasks.values())


@dataclass
class Round:
    """Evaluation at one step of one lineage."""

    unfinished: set[int] = field(default_factory=set)
    results: dict[int, bytes] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    is_open: bool = True


@dataclass
class Model:
    """One run."""

    limits: Limits
    now_us: int
    server: str
    state: str = "RUNNING"
    lineage: int = 0
    owner: str | None = None
    version: int = 0
    committed_step: int = 0
    fence: int = 0
    confirmed_server: str = ""
    lease_ms: int | None = None
    grace_until_ms: int | None = None
    reaped_ms: int | None = None
    arrivals: int = 0
    forks: dict[int, int] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    teachers: set[str] = field(default_factory=set)
    fates: dict[int, str] = field(default_factory=dict)
    """Of tasks that have ended: committed, cancelled, purged, dropped:<reason>."""
    reasons: set[str] = field(default_factory=set)
    tasks: dict[int, Task] = field(default_factory=dict)
    new: dict[int, list[bytes]] = field(default_factory=dict)
    open: dict[int, set[int]] = field(default_factory=dict)
    """Unit -> its members that are neither done nor dead."""
    buffer: dict[int, int] = field(default_factory=dict)
    claims: dict[int, Claim] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    rounds: dict[tuple[int, int], Round] = field(default_factory=dict)
    conversations: dict[int, Conversation] = field(default_factory=dict)
    news: int = 0
    """Changes of conversations."""
    hosts: dict[tuple[str, str], HostOfAgents] = field(default_factory=dict)
    """By incarnation and tag of its key."""
    recreated: dict[int, int | None] = field(default_factory=dict)
    publication: dict[str, str] = field(default_factory=dict)
    run_snapshot: bytes | None = None
    """The learner's newest."""
    actors: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    data_failures: int = 0
    data_failure: str | None = None
    """Why the newest of them failed."""
    paused: str | None = None
    """Why nothing is leased."""
    deaths: dict[int, int] = field(default_factory=dict)
    """Recent dead letter -> units that were complete by then."""
    requests: dict[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)
    """Tag of a key and incarnation -> number, fence and deadline of its last grant."""
    holders: dict[str, int] = field(default_factory=dict)
    """Tag of a key -> when it leased last."""
    suspended: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Tag of a key -> until when, for which time, and why."""

    @property
    def now_ms(self) -> int:
        """The store's clock."""
        return self.now_us // 1000

    def members(self, unit: int) -> list[int]:
        """Ids of a unit's tasks."""
        size = self.limits.group_size
        return list(range(unit * size, (unit + 1) * size))

    def unit_of(self, task: int) -> int:
        """The unit of a training task."""
        return task // self.limits.group_size

    def among_ready(
        self, round_key: tuple[int, int] | None, teacher: str | None = None
    ) -> list[int]:
        """Ready tasks of a round, of training or of a teacher, in the order they are leased in."""
        ready = {
            i: task.place
            for i, task in self.tasks.items()
            if (task.state, task.round, task.teacher) == ("R", round_key, teacher)
            and self._is_waiting(i)
        }
        return sorted(ready, key=lambda i: (ready[i], str(i)))

    def _is_waiting(self, task: int) -> bool:
        return task >= EVAL_BASE or self.unit_of(task) in self.open

    def leased(self) -> list[int]:
        """Leased tasks as they expire: training, then scoring, then evaluation."""
        held = {i: task for i, task in self.tasks.items() if task.state == "L"}
        kinds = {i: (i >= EVAL_BASE, task.teacher is not None) for i, task in held.items()}
        return sorted(held, key=lambda i: (kinds[i], held[i].deadline_ms, str(i)))

    def finished(self, unit: int) -> list[int]:
        """Members of a unit that were submitted."""
        return [i for i in self.members(unit) if i in self.tasks and self.tasks[i].state == "D"]

    def is_dead(self, task: int) -> bool:
        """A dead letter, or what was one."""
        return self.fates.get(task) == "purged" or (
            task in self.tasks and self.tasks[task].state == "X"
        )

    def check_learner(self, lineage: int) -> None:
        """Only the learner that owns the run may change it."""
        if lineage < self.lineage:
            raise Refused(f"LOST {self.lineage}")
        if lineage > self.lineage:
            raise Refused(f"REWOUND {self.lineage}")

    def judge(self, i: int, fence: int, key: str) -> str:
        """What the holder of a fence and a key hears: OK, DUP, STALE or GONE."""
        task = self.tasks.get(i)
        if task is None:
            return "STALE" if i < EVAL_BASE and self.unit_of(i) in self.new else "GONE"
        if task.made == (fence, key):
            return "DUP"
        if task.fence != fence or task.key not in (None, key) or task.state == "X":
            return "STALE"
        return "DUP" if task.state == "D" else "OK"

    def give_back(self, i: int) -> None:
        """A task waits to be resumed."""
        self.tasks[i].state, self.tasks[i].place = "R", RESUMED

    def charge(self, i: int, max_attempts: int, why: str) -> None:
        """One more attempt without progress; progress since the last one makes it the first."""
        task = self.tasks[i]
        length = task.length or 0
        grew = length > (task.length_charged or 0)
        task.attempts = 1 if grew else (task.attempts or 0) + 1
        task.length_charged = length
        task.lost_by = [*([] if grew else task.lost_by), task.key or ""]
        self._end_attempt(i, task.attempts, task.lost_by, max_attempts, why)

    def _end_attempt(self, i: int, failures: int, by: list[str], most: int, why: str) -> None:
        """Nothing dies while leasing is paused; of several holders, one alone kills less easily."""
        is_theirs = self._may_be_one_holders(by)
        if failures < most * (3 if is_theirs else 1) or self.paused is not None:
            self.give_back(i)
        else:
            self.bury(i, why, is_noted=not is_theirs)

    def _may_be_one_holders(self, by: list[str]) -> bool:
        """Whether too few are others' than those of whoever has most: of three, two say enough."""
        num_others = min(2, len(self.holders) - 1)
        if len(self.holders) < 2:
            num_others = 1 if "~" in by[-1] else 0
        owners = by if len(self.holders) < 2 else [holder_of(tag) for tag in by]
        worst = max((owners.count(owner) for owner in owners if owner), default=0)
        return worst > 0 and len(by) - worst < num_others

    def take_away(self, i: int, max_attempts: int, why: str) -> None:
        """A lease ends, and its holder cannot revive it; one that was reaped has been charged."""
        self.tasks[i].fence = None
        if self.tasks[i].state == "L":
            self.charge(i, max_attempts, why)

    def cut(self, i: int) -> None:
        """An unfinished completion goes; its task begins anew."""
        self.conversations.pop(i, None)
        task = self.tasks[i]
        task.chunks, task.num_bytes, task.length, task.length_charged = [], None, None, None
        task.last_fence = None

    def charge_data(self, i: int, max_failures: int, why: str) -> None:
        """The task itself failed, which no progress makes good."""
        task = self.tasks[i]
        self.data_failures += 1
        self.data_failure = why
        task.failures = (task.failures or 0) + 1
        task.failed_by = [*task.failed_by, task.key or ""]
        self._end_attempt(i, task.failures, task.failed_by, max_failures, why)

    def note_silence(self, i: int) -> None:
        """An agent that has not called counts against its host."""
        talk = self.conversations[i]
        if talk.ticket is not None and not talk.calls:
            host = self.hosts.setdefault((talk.host, talk.key), HostOfAgents())
            host.num_silent = (host.num_silent or 0) + 1

    def lose_conversation(self, i: int, most: int, why: str, key: str) -> None:
        """Nobody's agent can go on: the task begins anew, under another lease."""
        self.cut(i)
        task = self.tasks[i]
        task.fence = None
        task.losses = (task.losses or 0) + 1
        task.losses_by = [*task.losses_by, key]
        self._end_attempt(i, task.losses, task.losses_by, most, why)

    def note_news(self, i: int) -> None:
        """A conversation has changed."""
        self.news += 1
        self.conversations[i].news = self.news

    def turn_began_ms(self, i: int) -> int:
        """When the actor's turn began; now while it waits for its agent, 0 without one."""
        talk = self.conversations.get(i)
        if talk is None:
            return 0
        if not talk.num_open and talk.why is None:
            return self.now_ms
        assert talk.opened_ms is not None
        return talk.opened_ms

    def bury(self, i: int, why: str, *, is_noted: bool) -> None:
        """A task is not tried any more: a dead letter, or a failed evaluation."""
        self.conversations.pop(i, None)
        task = self.tasks[i]
        if task.round is not None:
            self.rounds[task.round].unfinished.discard(i)
            self.rounds[task.round].failed.add(i)
            del self.tasks[i]
            return
        task.state, task.why, task.died_ms = "X", why, self.now_ms
        if task.teacher is not None:
            task.kept_record = True
        if is_noted:
            self._note_death(i)
        unit = self.unit_of(i)
        alive = [member for member in self.members(unit) if not self.is_dead(member)]
        if len(alive) < min(self.limits.min_group_size, self.limits.group_size):
            self.drop_unit(unit, "group_broken")
        else:
            self.finish_members(unit, {i})

    def _note_death(self, i: int) -> None:
        """More than one in a hundred of the recent tasks died: leasing is paused."""
        self.deaths[i] = self.arrivals
        oldest = self.arrivals - RECENT_TASKS / self.limits.group_size
        self.deaths = {task: at for task, at in self.deaths.items() if at > oldest}
        if len(self.deaths) <= MOST_DEATHS:
            return
        ids = sorted(self.deaths, key=lambda task: (self.deaths[task], str(task)))
        dead = [self.tasks.get(task) for task in ids]
        why, count = _commonest([task.why or "" if task else "" for task in dead], _place)
        holder, held = _commonest([task.holder or "" if task else "" for task in dead], str)
        self.paused = (
            f"{len(ids)} of the last {RECENT_TASKS} tasks died, {count} of them of: {why[:400]}; "
            f"{held} in the hands of {holder}"
        )

    def finish_members(self, unit: int, done: set[int]) -> None:
        """When the last member is done or dead, the unit enters the buffer."""
        self.open[unit] -= done
        if not self.open[unit]:
            del self.open[unit]
            self.buffer[unit] = self.next_arrival()

    def next_arrival(self) -> int:
        """A number higher than all before."""
        self.arrivals += 1
        return self.arrivals

    def drop_unit(self, unit: int, reason: str) -> int:
        """End a unit for a reason."""
        self.reasons.add(reason)
        return self.end_unit(unit, f"dropped:{reason}")

    def end_unit(self, unit: int, fate: str) -> int:
        """End a unit; its dead members stay dead letters. Returns how many tasks ended."""
        self.new.pop(unit, None)
        self.open.pop(unit, None)
        self.buffer.pop(unit, None)
        ended = [i for i in self.members(unit) if not self.is_dead(i)]
        for i in ended:
            self.tasks.pop(i, None)
            self.conversations.pop(i, None)
            self.fates[i] = fate
        return len(ended)

    def remove_claim(self, k: int) -> None:
        """Nothing is left of a batch."""
        self.claims.pop(k, None)

    def close_round(self, key: tuple[int, int]) -> int:
        """End a round; its results stay readable. Returns how many tasks were unfinished."""
        if key not in self.rounds:
            return 0
        closed = self.rounds[key]
        count = len(closed.unfinished)
        for i in (*closed.unfinished, *closed.results):
            self.tasks.pop(i, None)
            self.conversations.pop(i, None)
        closed.unfinished, closed.is_open = set(), False
        return count

    def open_rounds(self) -> list[tuple[int, int]]:
        """In the order of their steps."""
        keys = [key for key, found in self.rounds.items() if found.is_open]
        return sorted(keys, key=lambda key: (key[1], f"{key[0]}:{key[1]}"))

    def close_all_rounds(self) -> None:
        """A learner ended."""
        for key in self.open_rounds():
            self.close_round(key)

    def draw_rank(self, sampling: str, number: float, kept: int) -> int:
        """Which of the kept units, in their order, a number in [0, 1) draws."""
        if sampling == "newest":
            return 0
        if sampling == "uniform":
            return math.floor(number * kept)
        rank: int = math.floor((kept + 1) ** number) - 1
        return min(rank, kept - 1)


def holder_of(tag: str) -> str:
    """The enrolment that registered a key, or the key itself."""
    return tag.partition("~")[0]


def _commonest(values: list[str], common: Callable[[str], str]) -> tuple[str, int]:
    """The kind that first is there more often than the ones before: its first value, its count."""
    counts: dict[str, int] = {}
    firsts: dict[str, str] = {}
    best = ""
    for value in values:
        kind = common(value)
        firsts.setdefault(kind, value)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] > counts.get(best, 0):
            best = kind
    return firsts[best], counts[best]


def _place(reason: str) -> str:
    """The file and line that a reason names; the reason where it names none."""
    found = re.search(r" at (\S+:[0-9]+)", reason)
    return found[1] if found else reason
