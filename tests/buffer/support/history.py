"""A random history of one run, in which everything goes wrong, and what must hold nevertheless.

Actors crash, repeat themselves and act from the grave; learners die and are replaced; Redis is
killed and loses its last seconds. The numbers in the assertions are those of the delivery
protocol's table of invariants, 8.6 is its section on recovery. To see a seed again:

    python -m tests.buffer.support.history --seed 37
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from buffer import operations
from buffer.client.scripts import LoadScript, load_script
from configs.errors import StoreError
from tests.buffer.support import history_actors as actors
from tests.buffer.support import history_faults as faults
from tests.buffer.support import history_learner as learners
from tests.buffer.support import history_replay as replay
from tests.buffer.support import history_talks as talks
from tests.buffer.support import history_teachers as teachers
from tests.buffer.support import invariants
from tests.buffer.support.history_world import GROUP_SIZE, World
from tests.conftest import running_redis

STEPS = 500
CHECK_EVERY = 20
FINAL_BATCHES = 4
STEPS_TO_FINISH = 4000

Happening = Callable[[World], None]


class History:
    """Drives one run and looks at all of the store now and then."""

    def __init__(self, url: str, seed: int, scripts: LoadScript = load_script) -> None:
        """Begin the run."""
        self.world = World(url, seed, scripts)
        self.saved = faults.Saved.take(self.world)
        self._digest = hashlib.sha256()

    def close(self) -> None:
        """Close its clients."""
        self.world.close()

    @property
    def trace(self) -> str:
        """A digest of all that happened; equal for equal seeds."""
        return self._digest.hexdigest()[:16]

    def play(self) -> None:
        """Play the whole history; raises AssertionError naming the invariant that was broken."""
        for step in range(STEPS):
            self.step()
            if step % CHECK_EVERY == 0:
                self.check()
        self.finish()

    def step(self) -> None:
        """Let one thing happen."""
        world = self.world
        if world.store.run(operations.closed()).paused:  # by deaths: an operator lets it go on
            world.store.run(operations.resume())
        choices: dict[Happening, float] = {
            actors.lease: 3,
            actors.generate: 6,
            actors.submit: 4,
            talks.serve: 5 * world.has_agents,
            talks.answer: 6 * world.has_agents,
            teachers.score: 4 * world.has_teachers,
            learners.learn: 2,
            self._mishap: 2 * world.faults,
        }
        choices |= {faults.recover: 2} if world.recovering else {learners.feed: 1}
        (happening,) = world.rng.choices(list(choices), list(choices.values()))
        happening(world)
        self._digest.update(f"{happening.__name__} {world.rng.random()} ".encode())

    def finish(self) -> None:
        """No more faults: the run must reach its end (I15), with nothing lost or trained twice."""
        world = self.world
        world.faults = 0.0
        if world.recovering:
            faults.recover(world)
        faults.end_grace(world)
        goal = world.learner.step + FINAL_BATCHES
        faults.expire(world, 1.0)
        for _ in range(STEPS_TO_FINISH):
            if world.learner.step >= goal:
                break
            self.step()
        learner = world.learner
        assert learner.step >= goal, f"I15: the run stands still at batch {learner.step}"
        world.store.run(operations.commit(learner.lineage, learner.step))
        learner.checkpoint = list(learner.trained)
        world.store.run(operations.cancel(learner.lineage))
        snapshot = self.check()
        for place in ("new", "ready", "lease", *invariants.SCORING, "done", "claimed"):
            assert not snapshot.tasks[place], f"I2: an ended run has tasks in {place}"
        tasks = [task for batch in learner.trained for task in batch]
        committed = snapshot.tasks["committed"]
        assert committed >= set(tasks), f"I5: {set(tasks) - committed} were trained, not committed"
        extra = {task // GROUP_SIZE for task in committed - set(tasks)}
        assert extra <= world.reconciled, f"I5: units {extra} were committed and never trained"
        self._digest.update(repr(sorted(map(repr, snapshot.tasks.items()))).encode())

    def check(self) -> invariants.Snapshot:
        """Assert what must hold now."""
        world, learner = self.world, self.world.learner
        snapshot = invariants.check(world.client, world.prefix, GROUP_SIZE)
        replay.check(world, snapshot)
        talks.check(world)
        for place in ("new", "ready", "lease", "dead"):
            again = world.promises.acked & snapshot.tasks[place] - snapshot.buried_records
            assert not again, f"I10: acknowledged tasks {again} in {place}"
        tasks = [task for batch in learner.trained for task in batch]
        assert len(tasks) == len(set(tasks)), "I5: an episode was trained twice"
        stats = world.store.run(operations.stats())
        _check_counts(world, snapshot, stats)
        if not world.recovering:
            durable = {task // GROUP_SIZE for batch in learner.checkpoint for task in batch}
            units = {task // GROUP_SIZE for task in snapshot.tasks["committed"]}
            assert units <= durable, f"I6: {units - durable} committed, in no checkpoint"
            assert stats.committed_step <= len(learner.checkpoint), "I6: commit before checkpoint"
        return snapshot

    def _mishap(self, world: World) -> None:
        """Something goes wrong that is not part of an exchange."""
        mishaps: dict[Happening, float] = {
            faults.expire: 6,
            faults.crash: 3,
            talks.crash_host: 2 * world.has_agents,
            faults.arrive_late: 3,
            learners.be_careless: 3,
            faults.requeue: 1,
            faults.end_grace: 3,
            learners.restart: 0.3,
            self._save: 3,
            self._kill_redis: 1,
            self._lose_power: 2,
        }
        (mishap,) = world.rng.choices(list(mishaps), list(mishaps.values()))
        mishap(world)

    def _save(self, world: World) -> None:
        if not world.recovering:
            self.saved = faults.Saved.take(world)

    def _kill_redis(self, world: World) -> None:
        faults.restart_redis(world, None)

    def _lose_power(self, world: World) -> None:
        faults.restart_redis(world, self.saved)


def _check_counts(world: World, snapshot: invariants.Snapshot, stats) -> None:
    """What the run says of itself is what the sets say, and no drop is without a reason (I21)."""
    assert stats.accounted == stats.created == len(snapshot.known), "I2: tasks are missing"
    by_reason = {
        place.removeprefix("dropped:"): len(tasks)
        for place, tasks in snapshot.tasks.items()
        if place.startswith("dropped:")
    }
    assert stats.dropped == by_reason, f"I21: {stats.dropped} reported, {by_reason} dropped"
    assert stats.dead == len(snapshot.tasks["dead"]), "I21: dead letters are miscounted"
    if not world.rewinds and not world.begun_anew:
        told = {reason: count for reason, count in world.dropped.items() if count}
        shown = {reason: count for reason, count in by_reason.items() if reason != "group_broken"}
        assert told == {k: v for k, v in shown.items() if v}, f"I21: {told} dropped, {shown} shown"


def main() -> int:
    """Play the seeds of the command line on a Redis of its own; prints those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=1, help="how many, one after the other")
    options = parser.parse_args()
    failed = 0
    with TemporaryDirectory() as folder, running_redis(Path(folder)) as url:
        for seed in range(options.seed, options.seed + options.count):
            history = History(url, seed)
            try:
                history.play()
            except (AssertionError, StoreError) as error:
                failed += 1
                print(f"seed {seed}: {error}", flush=True)
            finally:
                history.close()
    print(f"{options.count} histories, {failed} broken; the last trace is {history.trace}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
