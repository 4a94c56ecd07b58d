"""History of a simulated run, and the invariants that it must satisfy.

Watches every script that the store runs and every batch that is trained. When the store is rewound,
facts that it lost are removed here too, except those that must hold across rewinds: no fence is
granted twice, and nothing is trained twice in the surviving history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from buffer.operations.keys import run_prefix
from buffer.record.episode import Episode
from learner.data.claims import ClaimedBatch
from tests.buffer.support import invariants
from tests.simulation.memory_redis import MemoryRedis, Reply
from tests.simulation.store import View

CHANGES = {"beat": 8, "submit": 5, "release": 2, "fail": 4}
"""Scripts that act under a fence, and how many values each of their lines has."""
NUMBERS = {"beat": 6, "submit": 0}
"""Of those whose lines are one argument: which."""

LIAR = "liar"
"""Names of lying actors begin so."""

MOST_GAPS = 3
"""Chunks from different places that meet a gap in a row: copies of older ones may be late."""


@dataclass
class Memory:
    """What a rewind takes back."""

    fences: dict[int, int] = field(default_factory=dict)
    """The newest fence of each task."""
    acked: dict[int, None] = field(default_factory=dict)
    sealed: dict[int, list[int]] = field(default_factory=dict)

    def copy(self) -> Memory:
        return Memory(dict(self.fences), dict(self.acked), dict(self.sealed))


class History:
    """The record of one simulation."""

    def __init__(self, run: str, group_size: int, clock: Callable[[], float]) -> None:
        self._clock, self._prefix, self._size = clock, run_prefix(run), group_size
        self.now = Memory()
        self.makers: dict[tuple[int, int], str] = {}
        """Who was granted (task, fence), ever."""
        self.heard: set[tuple[int, int]] = set()
        """(task, fence) that its actor was told of."""
        self.lost: set[tuple[int, int]] = set()
        """What a broker granted as it was killed, before it could answer."""
        self.names: dict[str, str] = {}
        """Tag of a key -> its actor."""
        self.unwell: set[str] = set()
        """Actors that were killed, stopped, cut off or sent away, ever."""
        self.spoiled: set[int] = set()
        """Tasks that a liar was granted, ever: their tokens may be anything."""
        self.orphans: dict[int, float] = {}
        """Tasks of killed actors that nobody has taken over, and since when."""
        self.written: dict[tuple[int, int], None] = {}
        """(task, fence) of every submission that the store has ever taken."""
        self.gaps: dict[tuple[int, int], dict[int, None]] = {}
        """Offsets at which (task, fence) has met a gap since its last good beat."""
        self.reassigned_s: list[float] = []
        self.count: Counter[str] = Counter()
        self.committed_step = 0
        """The highest that any learner has asked to commit."""
        self.lineages: set[int] = set()
        """Of learners that took over."""
        self.tokens = 0
        self.step = 0
        self.steps_in_all = 0
        self.result: dict[int, list[int]] | None = None
        self.checks = 0

    def note(self, what: str) -> None:
        """Count something that happened."""
        self.count[what] += 1

    def watch(self, script: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        """See what the store was asked and what it answered."""
        if script == "lease":
            self.names[str(arguments[5])] = str(arguments[0])
        if script == "lease" and reply[0] == b"OK":
            self._granted(str(arguments[0]), int(reply[1]), [int(row[0]) for row in reply[2:]])
        elif script in CHANGES:
            self._acted(script, arguments, reply)
        elif script == "commit":
            self.committed_step = max(self.committed_step, int(arguments[1]))
        elif script == "suspend":
            name = self.names.get(str(arguments[0]), "?")
            self.count["suspensions"] += 1
            assert name.startswith(LIAR), f"SUSPENDED: {name}: {arguments[1]}"
        elif script == "reap":
            self._reaped([int(task) for task in reply])

    def _granted(self, incarnation: str, fence: int, tasks: list[int]) -> None:
        for task in tasks:
            if self.makers.get((task, fence)) == incarnation:
                self.count["grants repeated"] += 1
                continue
            assert (task, fence) not in self.makers, f"I8: fence {fence} of {task} granted again"
            assert fence > self.now.fences.get(task, 0), f"I8: fence of task {task} went back"
            self.makers[task, fence] = incarnation
            if incarnation.startswith(LIAR):
                self.spoiled.add(task)
            self.now.fences[task] = fence
            self._taken_over(task)
        self.count["leases"] += len(tasks)

    def _reaped(self, tasks: list[int]) -> None:
        """Leases have expired, and were charged: none that died with its broker, unheard of."""
        self.count["reaped"] += len(tasks)
        for task in tasks:
            lease = (task, self.now.fences.get(task, 0))
            if lease in self.lost - self.heard:
                maker = self.makers[lease]
                is_fair = maker in self.unwell or maker.startswith(LIAR)
                assert is_fair, f"GRANT: task {task} was charged, and {maker} never heard of it"

    def _taken_over(self, task: int) -> None:
        since = self.orphans.pop(task, None)
        if since is not None:
            self.reassigned_s.append(self._clock() - since)

    def _acted(self, script: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        if script in NUMBERS:
            arguments = tuple(arguments[NUMBERS[script]].split())
        width, stride = CHANGES[script], 2 if script == "beat" else 1
        skipped = len(arguments) % width
        for i, at in enumerate(range(skipped, len(arguments), width)):
            task, fence, verdict = int(arguments[at]), int(arguments[at + 1]), reply[i * stride]
            if verdict in (b"OK", b"DUP", b"GAP"):
                current = self.now.fences.get(task)
                is_made = verdict == b"DUP" and (task, fence) in self.written
                assert fence == current or is_made, (
                    f"I9: {verdict!r} of {script} for an old fence of {task}"
                )
            self.count[f"{script} {verdict.decode()}"] += 1
            if verdict == b"TAKEN":
                maker = self.makers[task, fence]
                is_fair = maker.startswith(LIAR) or maker in self.unwell
                assert is_fair, f"CHARGED: {script} of {maker} for task {task}"
            if script == "submit" and verdict in (b"OK", b"DUP"):
                self.now.acked[task] = None
                self.written[task, fence] = None
                self.orphans.pop(task, None)
            elif script == "beat" and int(arguments[at + 3]):
                self._chunk_answered(task, fence, int(arguments[at + 2]), verdict)

    def _chunk_answered(self, task: int, fence: int, offset: int, verdict: bytes) -> None:
        """An actor that hears of a gap goes back to where the store is."""
        if verdict != b"GAP":
            self.gaps.pop((task, fence), None)
            return
        if task in self.spoiled:
            return
        offsets = self.gaps.setdefault((task, fence), {})
        offsets[offset] = None
        assert len(offsets) <= MOST_GAPS, f"GAP: task {task} never closes it: {list(offsets)}"

    def received(self, task: int, fence: int) -> None:
        """An actor was told of a lease."""
        self.heard.add((task, fence))

    def lose_grant(self, fence: int) -> None:
        """The answer to the lease with this fence dies with its broker."""
        self.lost |= {lease for lease in self.makers if lease[1] == fence}

    def hurt(self, incarnation: str) -> None:
        """A fault struck this actor: it may not hear of what it is granted."""
        self.unwell.add(incarnation)

    def acknowledged(self, task: int, fence: int) -> None:
        """An actor was told that its episode is safe (I10)."""
        assert (task, fence) in self.written, f"I10: task {task} was acknowledged and not written"

    def lied(self, liar: str, task: int, fence: int, verdict: str) -> None:
        """A liar was answered: what it may change is what it was granted itself (I9)."""
        self.count[f"lies {verdict}"] += 1
        if verdict in ("OK", "DUP", "GAP"):
            maker = self.makers.get((task, fence))
            assert maker == liar, f"I9: {verdict} to {liar} for task {task}, which {maker} holds"

    def life_begins(self, lineage: int, step: int) -> None:
        """A learner took over, at the newest checkpoint that its disk has left."""
        self.count["lives of the learner"] += 1
        assert step >= self.committed_step, (
            f"COMMIT: batch {self.committed_step} was committed, the disk has {step}"
        )
        assert lineage not in self.lineages, f"LINEAGE: {lineage} begins again"
        self.lineages.add(lineage)
        self.step = step
        for k in [k for k in self.now.sealed if k <= step]:
            del self.now.sealed[k]

    def sealed(self, batch: ClaimedBatch) -> None:
        """A batch is about to be trained: a replay must be what was sealed (I7)."""
        ids = [episode.task_id for episode in batch.episodes]
        known = self.now.sealed.get(batch.step)
        assert not batch.is_replay or known in (None, ids), f"I7: batch {batch.step} has changed"
        self.now.sealed[batch.step] = ids
        self.count["replays"] += batch.is_replay

    def check_makers(self, episode: Episode) -> None:
        """Every token was made under a fence that its maker was granted (I4)."""
        if episode.task_id in self.spoiled:
            self.count["spoiled episodes"] += 1
            return
        for run in episode.completion.fences:
            maker = self.makers.get((episode.task_id, run.fence))
            assert maker == run.incarnation, f"I4: {run} of task {episode.task_id}"

    def trained(self, batch: ClaimedBatch, history: dict[int, list[int]]) -> None:
        """A batch was trained; `history` is the surviving one, with it."""
        self.step = batch.step
        self.steps_in_all += 1
        self.tokens += sum(len(episode.completion.token_ids) for episode in batch.episodes)
        tasks = [task for ids in history.values() for task in ids]
        assert len(tasks) == len(set(tasks)), "I5: a task was trained twice"
        assert list(history) == list(range(1, batch.step + 1)), "I6: a batch was left out"

    def finished(self, history: dict[int, list[int]]) -> None:
        """The run has ended."""
        self.result = history

    def died(self, incarnation: str, database: MemoryRedis) -> int:
        """An actor is gone: what it holds must soon be another's. Returns how much that is."""
        self.hurt(incarnation)
        held = [
            task
            for task in self._waiting(database, "lease")
            if self.makers.get((task, self.now.fences.get(task, 0))) == incarnation
        ]
        self.orphans |= dict.fromkeys(held, self._clock())
        return len(held)

    def orphans_left(self, database: MemoryRedis) -> bool:
        """Whether a dead actor's task still has no other holder; a dropped one needs none."""
        waiting = {*self._waiting(database, "lease"), *self._waiting(database, "ready")}
        self.orphans = {task: at for task, at in self.orphans.items() if task in waiting}
        return bool(self.orphans)

    def _waiting(self, database: MemoryRedis, place: str) -> list[int]:
        view: Any = View(database)
        return invariants.zset(view, f"{self._prefix}:{place}")

    def forget_orphans(self) -> None:
        """A fault prevents a timely takeover: these deaths are not measured."""
        self.orphans.clear()

    def check(self, database: MemoryRedis) -> invariants.Snapshot:
        """Assert what must hold of the store at any moment (I1, I2, I10)."""
        view: Any = View(database)
        snapshot = invariants.check(view, self._prefix, self._size)
        paused = view.hget(f"{self._prefix}:meta", "paused")
        assert paused is None, f"PAUSED: {paused}"
        poisonous = self._poisonous(view, snapshot.tasks["dead"]) | snapshot.buried_records
        for place in ("new", "ready", "lease", "dead"):
            lost = snapshot.tasks[place] & self.now.acked.keys() - poisonous
            assert not lost, f"I10: acknowledged tasks {sorted(lost)[:5]} are in {place}"
        self.checks += 1
        return snapshot

    def _poisonous(self, view: Any, dead: set[int]) -> set[int]:
        """Those of a batch that its learner died of too often: buried with their records."""
        return {
            task
            for task in dead
            if view.hget(f"{self._prefix}:t:{task}", "why") == b"poison"
            and view.exists(f"{self._prefix}:e:{task}")
        }

    def check_end(self, database: MemoryRedis) -> None:
        """Assert what must hold of a run that has ended (I2, I5)."""
        assert self.result is not None, "I15: the run has not ended"
        snapshot = self.check(database)
        trained = {task for ids in self.result.values() for task in ids}
        assert trained == snapshot.tasks["committed"], "I5: what is committed was trained"
        for place in ("new", "ready", "lease", *invariants.SCORING, "done", "claimed"):
            assert not snapshot.tasks[place], f"I2: tasks are left in {place}"
