"""A random history of one run: actors crash, repeat themselves, act from the grave; learners die.

Everything but the clock comes from the seed, and leases expire when the history says so: a failing
seed fails again. What an actor generates names its task, fence and position, so a record tells
where each of its tokens was made.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import redis

from buffer import operations
from buffer.answers import BeatLine, LeasedTask, NewTask
from buffer.keys import run_prefix
from buffer.operation import Operation
from buffer.scripts import LoadScript, load_script
from buffer.store import Store
from configs.errors import LostLineage
from tests.buffer import invariants

GROUP_SIZE = 3
UNITS_PER_BATCH = 3
MAX_POLICY_LAG = 1
MARGIN = 1.5
MAX_ATTEMPTS = 2
TTL_MS = 10**8  # nothing expires by itself
CAP = (MAX_POLICY_LAG + 1) * UNITS_PER_BATCH * MARGIN


@dataclass
class Held:
    """An actor's view of one lease."""

    task: int
    fence: int
    tokens: list[str]
    sent: int
    """Tokens that the actor believes the store has."""

    @property
    def target(self) -> int:
        """Length of the finished episode."""
        return 2 + self.task % 7

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
class Learner:
    """One life of the learner, and what its checkpoint would bring back."""

    lineage: int = 0
    trained: list[list[int]] = field(default_factory=list)
    checkpoint: list[list[int]] = field(default_factory=list)
    sealed: dict[int, list[int]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Batches trained in its history."""
        return len(self.trained)


class History:
    """Drives one run and asserts what every reply must respect."""

    def __init__(self, url: str, seed: int, scripts: LoadScript = load_script) -> None:
        """Begin the run with its first learner and three actors."""
        self.rng = random.Random(seed)
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
                min_group_size=2,
            )
        )
        self.learner = Learner(self.store.run(operations.begin_lineage(0, 0)) or 0)
        self.actors = [Actor(f"actor-{i}", (self.learner.lineage, 0)) for i in range(3)]
        self.zombies: list[Actor] = []
        self.old_lineages: list[int] = []
        self.late: list[Operation[object]] = []
        self.grants: dict[int, int] = {}
        self.acked: set[int] = set()
        self.created = 0
        self.faults = 1.0

    def close(self) -> None:
        """Close both clients."""
        self.store.close()
        self.client.close()

    def chance(self, probability: float) -> bool:
        """Decide whether a fault happens now."""
        return self.rng.random() < probability * self.faults

    def step(self) -> None:
        """Let one thing happen."""
        happening = self.rng.choices(
            [self.feed, self.lease, self.generate, self.submit, self.learn, self.mishap],
            [1, 3, 6, 4, 2, 2 * self.faults],
        )[0]
        happening()

    def feed(self) -> None:
        """Keep some units ready; sometimes create known ones again."""
        if self.client.zcard(f"{self.prefix}:new") < 2 * CAP:
            first = max(0, self.created - self.rng.randrange(3))
            ids = range(first * GROUP_SIZE, (self.created + 4) * GROUP_SIZE)
            tasks = [NewTask(i, i // GROUP_SIZE, b"") for i in ids]
            self.store.run(operations.create(self.learner.lineage, tasks))
            self.created += 4

    def lease(self) -> None:
        """An actor asks for work; fences must be new (I8) and admission must hold (I14)."""
        actor = self.rng.choice(self.actors)
        if self.rng.random() < 0.5:
            actor.version = (self.learner.lineage, self.learner.step)
        before = invariants.units_in_flight(self.client, self.prefix)
        call = operations.lease(
            actor.name, ttl_ms=TTL_MS, n=self.rng.randint(1, 12), version=actor.version
        )
        answer = self.store.run(call)
        after = invariants.units_in_flight(self.client, self.prefix)
        behind = self.learner.step - actor.version[1]
        same = actor.version[0] == self.learner.lineage
        cap = (MAX_POLICY_LAG + 1 - behind) * UNITS_PER_BATCH * MARGIN if same else CAP
        assert after <= max(before, cap + 1 - 1e-9), f"I14: {after} units, at most {cap} admitted"
        for task in answer.tasks:
            assert task.fence > self.grants.get(task.task_id, 0), "I8: a fence was granted again"
            self.grants[task.task_id] = task.fence
        if not self.chance(0.05):  # else the reply is lost, and the leases with it
            actor.held |= {task.task_id: _resume(task) for task in answer.tasks}

    def generate(self) -> None:
        """An actor makes tokens and sends snapshots; requests and replies get lost."""
        actor = self._someone()
        lines = []
        for held in actor.held.values():
            for _ in range(min(self.rng.randint(0, 3), held.target - len(held.tokens))):
                held.tokens.append(f"{held.task}.{held.fence}.{len(held.tokens)}")
            chunk = "".join(token + " " for token in held.tokens[held.sent :]).encode()
            tokens = len(held.tokens) - held.sent
            lines.append(BeatLine(held.task, held.fence, held.sent, tokens, chunk))
            if self.chance(0.05):
                lines.pop()  # the chunk is lost, and the actor does not know
            held.sent = len(held.tokens)
        fences = {line.task_id: line.fence for line in lines}
        for task, verdict in self._exchange(operations.beat(ttl_ms=TTL_MS, lines=lines), fences):
            if verdict[0] == "GAP":
                actor.held[task].sent = verdict[1]
            elif verdict[0] != "OK":
                del actor.held[task]

    def submit(self) -> None:
        """An actor submits what is finished; now and then it releases or fails the rest."""
        actor = self._someone()
        done = [held for held in actor.held.values() if len(held.tokens) == held.target]
        rows = [(held.task, held.fence, held.record()) for held in done]
        fences = {held.task: held.fence for held in done}
        for task, verdict in self._exchange(operations.submit(rows), fences):
            if verdict in ("OK", "DUP"):
                self.acked.add(task)
            del actor.held[task]
        some = list(actor.held.values())[:2]
        fences = {held.task: held.fence for held in some}
        if self.chance(0.1):
            self._exchange(operations.release(list(fences.items())), fences)
        elif self.chance(0.06):
            failures = [(task, fence, "data", "bad") for task, fence in fences.items()]
            call = operations.fail(max_attempts=MAX_ATTEMPTS, failures=failures)
            self._exchange(call, fences)
        else:
            return
        for held in some:
            del actor.held[held.task]

    def learn(self) -> None:
        """Train one batch: claim, drop, seal, train, checkpoint; the learner may die in between."""
        learner, k = self.learner, self.learner.step + 1
        claim = self.store.run(operations.claim(learner.lineage, k, UNITS_PER_BATCH))
        ids = [task for unit in claim.units for task in unit.task_ids]
        if k in learner.sealed:
            assert ids == learner.sealed[k], f"I7: batch {k} was {learner.sealed[k]}, now {ids}"
        if not claim.complete or self.chance(0.05):
            return
        if not claim.sealed and self.chance(0.2):
            unit = self.rng.choice(claim.units).group_id
            self.store.run(operations.drop(learner.lineage, k, [unit], "zero_variance"))
            return
        self._check_records(ids)
        self.store.run(operations.seal(learner.lineage, k))
        learner.sealed[k] = ids
        if self.chance(0.1):
            self.restart_learner()
            return
        learner.trained.append(ids)
        self.store.run(operations.advance(learner.lineage, k))
        if k % 2 == 0:
            learner.checkpoint = list(learner.trained)
            if not self.chance(0.2):
                self.store.run(operations.commit(learner.lineage, k))
        if self.chance(0.05):
            self.restart_learner()

    def restart_learner(self) -> None:
        """The learner dies; the next one loads the checkpoint."""
        old = self.learner
        self.old_lineages.append(old.lineage)
        lineage = self.store.run(operations.begin_lineage(old.lineage, len(old.checkpoint))) or 0
        self.learner = Learner(lineage, list(old.checkpoint), old.checkpoint, old.sealed)
        self.store.run(operations.commit(lineage, self.learner.step))

    def mishap(self) -> None:
        """Something goes wrong that is not part of an exchange."""
        kind = self.rng.choice(["expire", "expire", "crash", "late", "zombie learner"])
        if kind == "expire":
            self._expire(0.2)
            self.store.run(operations.reap(max_attempts=MAX_ATTEMPTS))
        elif kind == "crash" and self.chance(0.3):
            index = self.rng.randrange(len(self.actors))
            dead = self.actors[index]
            self.zombies = [*self.zombies[-2:], dead]
            self.actors[index] = Actor(dead.name + "'", dead.version)
        elif kind == "late" and self.late:
            self.store.run(self.late.pop(self.rng.randrange(len(self.late))))
        elif kind == "zombie learner" and self.old_lineages:
            k = self.learner.step + 1
            call = self.rng.choice([operations.claim(self.old_lineages[-1], k, 9), None])
            try:
                self.store.run(call or operations.advance(self.old_lineages[-1], k))
            except LostLineage:
                return
            raise AssertionError("an old learner was heard")

    def finish(self, batches: int) -> None:
        """No more faults: the run must reach its end (I15), with nothing lost or trained twice."""
        self.faults = 0.0
        goal = self.learner.step + batches
        self._expire(1.0)
        self.store.run(operations.reap(max_attempts=10**6))
        for _ in range(4000):
            if self.learner.step >= goal:
                break
            self.step()
        assert self.learner.step >= goal, "I15: the run stands still"
        learner = self.learner
        self.store.run(operations.commit(learner.lineage, learner.step))
        self.store.run(operations.cancel(learner.lineage))
        snapshot = self.check()
        ids = [task for batch in learner.trained for task in batch]
        assert len(ids) == len(set(ids)), "I5: an episode was trained twice"
        assert set(ids) == snapshot.tasks["committed"], "I5: what is committed was trained"
        for place in ("new", "ready", "lease", "done", "claimed"):
            assert not snapshot.tasks[place]

    def check(self) -> invariants.Snapshot:
        """Assert what must hold now; an acknowledged episode is never made again (I10)."""
        snapshot = invariants.check(self.client, self.prefix, GROUP_SIZE)
        for place in ("new", "ready", "lease", "dead"):
            assert not self.acked & snapshot.tasks[place], f"I10: acknowledged tasks in {place}"
        stats = self.store.run(operations.stats())
        assert stats.accounted == stats.created == len(snapshot.known)
        return snapshot

    def _someone(self) -> Actor:
        return self.rng.choice(self.actors + (self.zombies if self.chance(0.4) else []))

    def _expire(self, share: float) -> None:
        for task in sorted(invariants.zset(self.client, f"{self.prefix}:lease")):
            if self.rng.random() < share:
                self.client.zadd(f"{self.prefix}:lease", {str(task): 1})

    def _exchange(self, call, fences: dict[int, int]):
        """Send a request through a bad network; returns the verdicts that reach the actor."""
        if not fences or self.chance(0.05):
            return []
        verdicts = self.store.run(call)
        if self.chance(0.1):
            verdicts = self.store.run(call)
        if self.chance(0.1):
            self.late.append(call)
        for (task, fence), verdict in zip(fences.items(), verdicts, strict=True):
            word = verdict if isinstance(verdict, str) else verdict[0]
            current = fence == self.grants[task]
            assert current or word in ("STALE", "GONE"), f"I9: {word} for an old fence of {task}"
        return [] if self.chance(0.05) else list(zip(fences, verdicts, strict=True))

    def _check_records(self, ids: list[int]) -> None:
        for task, record in zip(ids, self.store.run(operations.records(ids)), strict=True):
            assert record is not None, f"I10: task {task} has no record"
            tokens = [tuple(map(int, token.split("."))) for token in record.decode().split()]
            length = Held(task, 0, [], 0).target
            assert [token[0] for token in tokens] == [task] * length, f"I3: {tokens}"
            assert [token[2] for token in tokens] == list(range(length)), f"I3: {tokens}"
            fences = [token[1] for token in tokens]
            assert fences == sorted(fences), f"I4: {tokens}"


def _resume(task: LeasedTask) -> Held:
    tokens = b"".join(task.chunks).decode().split()
    assert len(tokens) == task.length, f"I3: {task.length} tokens stored, got {tokens}"
    return Held(task.task_id, task.fence, tokens, len(tokens))
