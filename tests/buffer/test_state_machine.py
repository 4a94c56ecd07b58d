"""The life of tasks, units and batches against a model of a few lines, on a real Redis.

The model is what the store promises, in Python's own sets: which verdict a fence gets, where a task
goes, which units are complete, what a claim holds. Hypothesis looks for the shortest story in which
the two differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as play

from buffer import operations
from buffer.operations.values import BeatLine, NewTask
from buffer.store import Store
from tests.buffer.support import invariants

GROUP_SIZE = 2
UNITS_PER_BATCH = 2
CAP = 4  # units: lag 1, two in a batch, margin 1
MAX_ATTEMPTS = 2


@dataclass
class Task:
    """What the store should know of a task."""

    unit: int
    place: str = "new"
    """new, ready, lease, done, claimed, dead, committed or dropped."""
    fence: int = 0
    length: int = 0
    failures: int = 0


@dataclass
class Model:
    """The store's promises."""

    tasks: dict[int, Task] = field(default_factory=dict)
    buffered: list[int] = field(default_factory=list)
    """Complete units that no batch has, the oldest first."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    trained: int = 0

    def members(self, unit: int) -> list[int]:
        """Tasks of a unit that are not dead."""
        return [i for i, task in self.tasks.items() if task.unit == unit and task.place != "dead"]

    def in_flight(self) -> set[int]:
        """Units that somebody began and no step has consumed."""
        held = {unit for k, units in self.batches.items() if k > self.trained for unit in units}
        live = {t.unit for t in self.tasks.values() if t.place in ("ready", "lease", "done")}
        return held | live

    def verdict(self, task: int, fence: int) -> str:
        """Judge an operation on a task."""
        known = self.tasks.get(task)
        if known is None or known.place in ("committed", "dropped"):
            return "GONE"
        if known.place == "dead" or known.fence != fence:
            return "STALE"
        return "DUP" if known.place in ("done", "claimed") else "OK"

    def settle(self, unit: int) -> None:
        """A member finished or died: the unit may be broken, or complete."""
        alive = self.members(unit)
        if len(alive) < GROUP_SIZE:  # the least that a unit must have, here
            for task in alive:
                self.tasks[task].place = "dropped"
        elif all(self.tasks[task].place == "done" for task in alive):
            self.buffered.append(unit)


class StoreMachine(RuleBasedStateMachine):
    """Does the same to the store and to the model."""

    url = ""

    def __init__(self) -> None:
        """Begin a run."""
        super().__init__()
        self.client = redis.Redis.from_url(self.url)
        self.client.flushdb()
        self.store = Store(self.url, "run")
        self.store.run(
            operations.begin_run(
                "c",
                {},
                units_per_batch=UNITS_PER_BATCH,
                max_policy_lag=1,
                margin=1.0,
                group_size=GROUP_SIZE,
                min_group_size=GROUP_SIZE,
            )
        )
        self.store.run(operations.begin_lineage(0, 0))
        self.model = Model()
        self.grants: list[tuple[int, int]] = []

    def teardown(self) -> None:
        """Close the clients."""
        self.store.close()
        self.client.close()

    @rule(unit=st.integers(0, 7))
    def create(self, unit: int) -> None:
        """Create a unit, perhaps once more."""
        ids = range(unit * GROUP_SIZE, (unit + 1) * GROUP_SIZE)
        created = self.store.run(operations.create(1, [NewTask(i, unit, b"") for i in ids]))
        assert created == (0 if ids[0] in self.model.tasks else GROUP_SIZE)
        for task in ids:
            self.model.tasks.setdefault(task, Task(unit))

    @rule(n=st.integers(1, 9))
    def lease(self, n: int) -> None:
        """Lease: started tasks first, and new units while there is room for them."""
        model = self.model
        version = (1, model.trained)
        waiting = {i for i, task in model.tasks.items() if task.place == "ready"}
        before = len(model.in_flight())
        answer = self.store.run(operations.lease("a", ttl_ms=10**8, n=n, version=version))
        granted = {task.task_id for task in answer.tasks}

        assert len(granted & waiting) == min(n, len(waiting))
        for leased in answer.tasks:
            known = model.tasks[leased.task_id]
            assert known.place in ("new", "ready") and leased.fence > known.fence
            assert leased.length == known.length
            known.place, known.fence = "lease", leased.fence
            self.grants.append((leased.task_id, leased.fence))
        begun = {model.tasks[task].unit for task in granted - waiting}
        for task in model.tasks.values():
            if task.unit in begun and task.place == "new":
                task.place = "ready"
        assert not begun or before + len(begun) <= CAP
        if not granted:
            unstarted = any(task.place == "new" for task in model.tasks.values())
            assert not unstarted or before >= CAP, "room for a unit, and none was begun"

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), tokens=st.integers(0, 3), skipped=st.integers(-1, 1))
    def beat(self, data: st.DataObject, tokens: int, skipped: int) -> None:
        """Beat with a chunk that fits, overlaps or leaves a gap; a reaped lease comes back."""
        task, fence = data.draw(st.sampled_from(self.grants))
        known, word = self.model.tasks[task], self.model.verdict(task, fence)
        offset = max(0, known.length + skipped)
        line = BeatLine(task, fence, offset, tokens, b"x" * tokens)
        (verdict,) = self.store.run(operations.beat(ttl_ms=10**8, lines=[line]))
        if word == "OK":
            known.place = "lease"
            if tokens and offset == known.length:
                known.length += tokens
            elif tokens and offset + tokens > known.length:
                word = "GAP"
            assert verdict.length == known.length
        assert verdict.verdict == word

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Submit, under any fence that was ever granted."""
        task, fence = data.draw(st.sampled_from(self.grants))
        word = self.model.verdict(task, fence)
        assert self.store.run(operations.submit([(task, fence, b"r")])) == [word]
        if word == "OK":
            self.model.tasks[task].place = "done"
            self.model.settle(self.model.tasks[task].unit)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Give back."""
        task, fence = data.draw(st.sampled_from(self.grants))
        word = self.model.verdict(task, fence)
        assert self.store.run(operations.release([(task, fence)])) == [word]
        if word == "OK":
            self.model.tasks[task].place = "ready"

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Fail for the data's sake: the second time the task is dead."""
        task, fence = data.draw(st.sampled_from(self.grants))
        known, word = self.model.tasks[task], self.model.verdict(task, fence)
        call = operations.fail(
            max_attempts=99, max_data_failures=MAX_ATTEMPTS, failures=[(task, fence, "data", "bad")]
        )
        assert self.store.run(call) == [word]
        if word == "OK":
            known.failures += 1
            known.place = "ready" if known.failures < MAX_ATTEMPTS else "dead"
            if known.place == "dead":
                self.model.settle(known.unit)

    @rule()
    def learn(self) -> None:
        """Claim the next batch; what it holds stays in it, the oldest first."""
        model, k = self.model, self.model.trained + 1
        claim = self.store.run(operations.claim(1, k, UNITS_PER_BATCH))
        batch = model.batches.setdefault(k, [])
        while len(batch) < UNITS_PER_BATCH and model.buffered:
            batch.append(model.buffered.pop(0))
        for unit in batch:
            for task in model.members(unit):
                model.tasks[task].place = "claimed"
        assert [unit.group_id for unit in claim.units] == batch
        if claim.complete:
            self.store.run(operations.seal(1, k))
            self.store.run(operations.advance(1, k))
            model.trained = k

    @precondition(lambda self: self.model.trained)
    @rule()
    def commit(self) -> None:
        """Commit all that was trained."""
        model = self.model
        self.store.run(operations.commit(1, model.trained))
        for k in [k for k in model.batches if k <= model.trained]:
            for unit in model.batches.pop(k):
                for task in model.members(unit):
                    model.tasks[task].place = "committed"

    @invariant()
    def places_agree(self) -> None:
        """Every task is where the model has it."""
        snapshot = invariants.check(self.client, "nyala:{run}", GROUP_SIZE)
        for number, task in self.model.tasks.items():
            place = "dropped:group_broken" if task.place == "dropped" else task.place
            assert snapshot.places_of(number) == [place]
        assert snapshot.known == set(self.model.tasks)


@pytest.fixture
def machine(redis_url: str) -> type[StoreMachine]:
    """The machine with an address."""
    return type("AddressedMachine", (StoreMachine,), {"url": redis_url})


@pytest.mark.slow
def test_the_store_does_what_the_model_says(machine: type[StoreMachine]) -> None:
    play(machine, settings=settings(max_examples=60, stateful_step_count=40))
