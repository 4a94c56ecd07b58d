"""A fleet, its learner and the weights between them in simulated time, around the real scripts.

Every lease, submission, claim, drop, seal, advance and commit, and what a dead actor had in flight,
is a call of the store's scripts: so admission, order and resumption are what a run has. Engines,
training and transfers only take time. So do not brokers: `costs.py` measures what they have to do.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

from benchmarks.scale.engines import Engine, Episode
from benchmarks.scale.store import SimulatedStore
from benchmarks.scale.tally import Tally
from benchmarks.scale.workload import (
    GROUP_SIZE,
    LEASE_TIMEOUT_S,
    SNAPSHOT_S,
    Workload,
    arrival_s,
)
from buffer import operations
from buffer.operations.values import BeatLine, NewTask, SubmitLine, version_number

EPOCH_S = 1.8e9
NEVER_MS = 10**9
"""Of a lease: heartbeats take no time here; those of a dead actor end after `LEASE_TIMEOUT_S`."""
LOOK_S = 0.02
"""The learner's claims (`learner/data/claims.py`)."""
AHEAD = 2
"""Groups created, as a multiple of those that may be open (`learner/data/curriculum.py`)."""
RECORD = b"record"


class Fleet:
    """One run; `run` it once."""

    def __init__(
        self,
        workload: Workload,
        *,
        actors: int,
        max_policy_lag: int,
        transport: str,
        seed: int,
    ) -> None:
        self._workload = workload
        self.store = SimulatedStore(lambda: EPOCH_S + self._now)
        self._max_policy_lag = max_policy_lag
        self._arrival_s = arrival_s(workload, transport, actors)
        self._random = random.Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._names = itertools.count()
        self._engines: list[Engine] = []
        self._ended: list[Engine] = []
        self._waiting: deque[Engine] = deque()
        """Actors with free places whose LEASE waits."""
        self._episodes: dict[int, Episode] = {}
        self._made: dict[int, tuple[int, int]] = {}
        """Task -> tokens and oldest version, until it is trained or dropped."""
        self._created = self._step = self._stale = 0
        self._moving: set[str] = set()
        """Actors that a version is on its way to."""
        self._ready_at = 0.0
        self.tally = Tally()
        self._num_actors = actors

    def run(self, *, warm_up: int, steps: int, most_s: float) -> dict[str, float]:
        """Train so many batches after a warm-up; returns shares and rates of that time."""
        self._begin()
        for _ in range(self._num_actors):
            self._after(self._random.uniform(0, 10), self._start_actor)
        self._after(LOOK_S, self._learn)
        self._until(lambda: self._step >= warm_up, most_s)
        self._settle()
        began, self.tally = self._now, Tally()
        for engine in (*self._engines, *self._ended):
            engine.busy_s = engine.place_s = 0.0
        self._until(lambda: self._step >= warm_up + steps, self._now + most_s)
        self._settle()
        figures = self.tally.shown(
            self._workload,
            (*self._engines, *self._ended),
            actors=self._num_actors,
            seconds=self._now - began,
        )
        return figures | {"weights_arrive_s": round(self._arrival_s, 1)}

    def _begin(self) -> None:
        workload = self._workload
        self.store.run(
            operations.begin_run(
                "scale",
                {},
                units_per_batch=workload.groups_per_batch,
                max_policy_lag=self._max_policy_lag,
                margin=1.0,
                group_size=GROUP_SIZE,
                min_group_size=GROUP_SIZE,
            )
        )
        assert self.store.run(operations.begin_lineage(0, 0)) == 1, "the store must be new"
        self._feed()

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._numbers), action))

    def _until(self, holds: Callable[[], bool], most_s: float) -> None:
        while not holds() and self._events and self._now < most_s:
            self._now, _, action = heapq.heappop(self._events)
            action()

    def _settle(self) -> None:
        for engine in self._engines:
            engine.advance(self._now)

    # Actors

    def _start_actor(self) -> None:
        engine = Engine(self._workload, f"actor-{next(self._names)}", self._step, at=self._now)
        self._engines.append(engine)
        if self._workload.life_s:
            life_s = self._random.expovariate(1 / self._workload.life_s)
            self._after(life_s, lambda: self._preempt(engine))
        self._lease(engine)

    def _lease(self, engine: Engine) -> bool:
        """Fill free places; an actor that gets nothing waits for its turn."""
        engine.advance(self._now)
        answer = self.store.run(
            operations.lease(
                engine.name, ttl_ms=NEVER_MS, n=engine.free, version=(1, engine.version)
            )
        )
        for task in answer.tasks:
            episode = self._episodes.get(task.task_id)
            if episode is None:
                tokens = self._workload.length(self._random)
                episode = Episode(task.task_id, task.fence, tokens, engine.version)
                self._episodes[task.task_id] = episode
            else:
                assert task.length == episode.done, "it goes on where the store is"
                episode.fence = task.fence
                episode.oldest = episode.oldest if episode.done else engine.version
                self.tally.resumed += 1
            engine.start(episode)
        if engine.free and engine not in self._waiting:
            self._waiting.append(engine)
        self._schedule(engine)
        return bool(answer.tasks)

    def _schedule(self, engine: Engine) -> None:
        ends = engine.next_end()
        if ends is None:
            return
        engine.visit = number = next(self._numbers)

        def visit() -> None:
            if engine.is_alive and engine.visit == number:
                self._submit(engine)

        self._after(ends - self._now, visit)

    def _submit(self, engine: Engine) -> None:
        engine.advance(self._now)
        ended = engine.finished()
        if ended:
            lines = [
                SubmitLine(e.task_id, e.fence, RECORD, oldest=version_number((1, e.oldest)))
                for e in ended
            ]
            verdicts = self.store.run(operations.submit(lines))
            assert set(verdicts) <= {"OK", "GONE"}, f"its group may have been dropped: {verdicts}"
            for episode in ended:
                del self._episodes[episode.task_id]
                self._made[episode.task_id] = episode.tokens, episode.oldest
                self.tally.submitted += 1
                self.tally.submitted_tokens += episode.tokens
        self._lease(engine)

    def _wake(self) -> None:
        """Let those that wait ask again, the longest wait first, until one gets nothing."""
        for _ in range(len(self._waiting)):
            engine = self._waiting.popleft()
            if engine.is_alive and engine.free and not self._lease(engine):
                return

    def _preempt(self, engine: Engine) -> None:
        """Take a machine away without notice; its leases expire, and a successor comes."""
        engine.advance(self._now)
        speed = self._workload.tokens_per_s(max(1, len(engine.heap)))
        lost = engine.stop(self._random.uniform(0, SNAPSHOT_S) * speed)
        lines = [
            BeatLine(e.task_id, e.fence, 0, e.done, RECORD, oldest=version_number((1, e.oldest)))
            for e in lost
            if e.done
        ]
        self.store.run(operations.beat(ttl_ms=NEVER_MS, lines=lines, progress_timeout_ms=0))
        self.tally.preempted += 1
        self._engines.remove(engine)
        self._ended.append(engine)
        self._after(LEASE_TIMEOUT_S, lambda: self._expire(engine))
        self._after(self._workload.start_s, self._start_actor)

    def _expire(self, engine: Engine) -> None:
        self.store.run(operations.release_dead_actor(engine.name, "", max_attempts=1000))
        self._wake()

    # Learner

    def _learn(self) -> None:
        """Look for a complete batch; train it when there is one."""
        step = self._step + 1
        claim = self.store.run(operations.claim(1, step, self._workload.groups_per_batch))
        stale = [
            unit.group_id
            for unit in claim.units
            if self._lag(unit.task_ids, step) > self._max_policy_lag
        ]
        if stale:
            self.store.run(operations.drop(1, step, stale, "stale"))
            self.tally.stale_groups += len(stale)
            self._stale += len(stale)
            self._feed()
            self._wake()
        if stale or not claim.complete:
            self._after(LOOK_S if stale else 0.25, self._learn)
            return
        self.store.run(operations.seal(1, step))
        ids = [task for unit in claim.units for task in unit.task_ids]
        tokens = sum(self._made[task][0] for task in ids)
        self.tally.waited_s += self._now - self._ready_at
        self.tally.trained_tokens += tokens
        for task in ids:
            self.tally.lags[self._lag([task], step)] += 1
            del self._made[task]
        self._after(tokens / self._workload.learner_tokens_per_s, lambda: self._trained(step))

    def _lag(self, task_ids: list[int], step: int) -> int:
        return max(step - 1 - self._made[task][1] for task in task_ids)

    def _trained(self, step: int) -> None:
        self.store.run(operations.advance(1, step))
        self.store.run(operations.commit(1, step))
        self._step, self._ready_at = step, self._now
        self.tally.steps += 1
        self._feed()
        for engine in self._engines:
            self._send_weights(engine)
        self._wake()
        self._learn()

    def _send_weights(self, engine: Engine) -> None:
        """The newest version leaves for an actor, unless another is on its way to it."""
        if engine.name in self._moving:
            return
        self._moving.add(engine.name)
        version = self._step

        def arrive() -> None:
            self._moving.discard(engine.name)
            if not engine.is_alive:
                return
            engine.version = max(engine.version, version)
            if engine.version < self._step:
                self._send_weights(engine)
            if engine in self._waiting:
                self._wake()

        self._after(self._arrival_s * self._random.uniform(0.9, 1.1), arrive)

    def _feed(self) -> None:
        """Create groups ahead of need."""
        size = self._workload.groups_per_batch
        used = self._step * size + self._stale
        ahead = AHEAD * (self._max_policy_lag + 1) * size
        groups = range(self._created, max(self._created, used + ahead))
        self._created = groups.stop
        tasks = [
            NewTask(task, group, b"spec")
            for group in groups
            for task in range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        ]
        if tasks:
            self.store.run(operations.create(1, tasks))
