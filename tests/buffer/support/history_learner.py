"""The learner of a random history: feed, claim, drop, seal, train, checkpoint, die."""

from __future__ import annotations

from buffer import operations
from buffer.operations.operation import Operation
from buffer.operations.values import Claim, NewTask
from configs.errors import LostLineage, StoreError, StoreRewound
from tests.buffer.support import history_replay as replay
from tests.buffer.support import invariants
from tests.buffer.support.history_world import (
    CAP,
    GROUP_SIZE,
    MAX_POLICY_LAG,
    MIN_GROUP_SIZE,
    SCORE,
    UNITS_PER_BATCH,
    Learner,
    World,
    length_of,
    units_of,
)


def feed(world: World) -> None:
    """Keep some units ready; sometimes create known ones again."""
    if world.client.zcard(f"{world.prefix}:new") < 2 * CAP:
        first = max(0, world.created - world.rng.randrange(3))
        create(world, first, world.created + 4)
        world.created += 4


def create(world: World, first: int, last: int) -> None:
    """Create the units from `first` until before `last`."""
    ids = range(first * GROUP_SIZE, last * GROUP_SIZE)
    tasks = [NewTask(i, i // GROUP_SIZE, b"") for i in ids]
    world.tell(operations.create(world.learner.lineage, tasks))


def learn(world: World) -> None:
    """Train one batch: claim, drop, seal, train, checkpoint; the learner may die in between."""
    learner, k = world.learner, world.learner.step + 1
    try:
        claim = _claim(world, k)
    except StoreRewound:
        assert world.recovering, "I6: the store forgot the learner's lineage"
        return
    if world.recovering:
        assert not claim.units, "8.6: CLAIM was open while RECOVERING"
        return
    tasks = [task for unit in claim.units for task in unit.task_ids]
    _check_replay(world, k, tasks)
    if not claim.complete or world.chance(0.05):
        return
    if not _is_fit(world, k, claim, tasks):
        return
    if not claim.sealed and world.chance(0.05):
        _forget_to_seal(world, k)
    again = replay.draw(world, k, is_sealed=claim.sealed)
    world.tell(operations.seal(learner.lineage, k, replay.ratings(claim.units, k)))
    learner.sealed[k] = tasks
    if world.chance(0.1):
        restart(world)
        return
    learner.trained.append(tasks)
    learner.again.append(again)
    world.tell(operations.advance(learner.lineage, k))
    world.tell(operations.write_run_snapshot(learner.lineage, b"batch %d" % k))
    if k % 2 == 0:
        learner.checkpoint = list(learner.trained)
        if not world.chance(0.2):
            world.tell(operations.commit(learner.lineage, k))
            replay.trim(world)
    if world.chance(0.05):
        restart(world)


def restart(world: World) -> None:
    """The learner dies; the next one loads the checkpoint."""
    old = world.learner
    world.old_lineages.append(old.lineage)
    step, owner = len(old.checkpoint), f"after {old.lineage}"
    stored = world.store.run(operations.stats()).lineage
    take_over = operations.begin_lineage(stored, step, owner=owner, at_least=old.lineage + 1)
    lineage = world.tell(take_over)
    assert lineage is not None and lineage > old.lineage, f"I12: lineage {lineage} again"
    world.forks[lineage] = step
    sealed, drawn = ({}, {}) if world.recovering else (old.sealed, old.drawn)
    again = old.again[:step]
    world.learner = Learner(
        lineage, owner, list(old.checkpoint), old.checkpoint, sealed, again, drawn
    )
    if not world.recovering:
        world.tell(operations.commit(lineage, step))


def be_careless(world: World) -> None:
    """The learner, or one that was replaced, asks for what would break the run."""
    lineage, k = world.learner.lineage, world.learner.step + 1
    if world.recovering:
        return
    _refused(world, operations.commit(lineage, k), f"I6: batch {k} was committed, not trained")
    if k in world.learner.sealed:
        unit = units_of(world.learner.sealed[k])[0]
        _refused(world, operations.drop(lineage, k, [unit], "late"), "I7: a sealed batch shrank")
    if world.old_lineages:
        old = world.old_lineages[-1]
        call = world.rng.choice(
            [
                operations.claim(old, k, 9),
                operations.advance(old, k),
                operations.write_run_snapshot(old, b"old"),
            ]
        )
        try:
            world.store.run(call)
        except LostLineage:
            return
        raise AssertionError("I6: an old learner was heard")


def _claim(world: World, k: int) -> Claim:
    """Claim, and see that only known units go unlisted, and none of a full batch."""
    known = world.learner.known.setdefault(k, set())
    call = operations.claim(world.learner.lineage, k, UNITS_PER_BATCH, num_read=len(known))
    if world.chance(0.05):
        world.store.run(call)  # the reply is lost
    claim = world.store.run(call)
    listed = {unit.group_id for unit in claim.units}
    if not world.recovering and not claim.sealed:
        held = set(invariants.zset(world.client, f"{world.prefix}:c:{k}"))
        heard = listed if len(held) >= UNITS_PER_BATCH else listed | known
        assert heard == held, f"I15: batch {k} has {held}; who knows {known} hears of {listed}"
    known |= listed
    return claim


def _refused(world: World, call: Operation[object], otherwise: str) -> None:
    try:
        world.store.run(call)
    except StoreError:
        return
    raise AssertionError(otherwise)


def _forget_to_seal(world: World, k: int) -> None:
    """A batch that was never frozen could not be replayed: it must not be committed either."""
    lineage = world.learner.lineage
    world.tell(operations.advance(lineage, k))
    _refused(world, operations.commit(lineage, k), f"I6: batch {k} was committed before its seal")


def _check_replay(world: World, k: int, tasks: list[int]) -> None:
    """A sealed batch comes back as it was; after a rewind at least its units do (I7)."""
    before = world.learner.sealed.get(k)
    if before is None:
        return
    if world.reconciled & set(units_of(before)):
        assert units_of(tasks) == units_of(before), f"I7: batch {k} was {before}, now {tasks}"
    else:
        assert tasks == before, f"I7: batch {k} was {before}, now {tasks}"


def _is_fit(world: World, k: int, claim: Claim, tasks: list[int]) -> bool:
    """Look at all records; drops what is stale, or a whole batch whose records a rewind took."""
    learner = world.learner
    stale, lost = [], set()
    for task, record in zip(tasks, world.store.run(operations.records(tasks)), strict=True):
        unit = task // GROUP_SIZE
        if record is None:
            assert unit in world.reconciled, f"I10: task {task} has no record"
            lost.add(unit)
        elif _lag_of(world, task, _unscored(world, task, record)) > MAX_POLICY_LAG:
            stale.append(unit)
    if lost:
        if k > world.store.run(operations.stats()).version:
            _drop(world, operations.abandon(learner.lineage, k, "lost"), "lost")
            learner.sealed.pop(k, None)
            learner.drawn.pop(k, None)
            learner.known.pop(k, None)
        return False
    if claim.sealed:
        return True
    small = [unit for unit in claim.units if len(unit.task_ids) < MIN_GROUP_SIZE]
    assert not small, f"I2: too few members of {small} are left"
    gone = sorted(set(stale)) or [claim.units[0].group_id] * world.chance(0.2)
    if gone:
        reason = "stale" if stale else "zero_variance"
        _drop(world, operations.drop(learner.lineage, k, gone, reason), reason)
        learner.known[k] -= set(gone)
        again = world.store.run(operations.claim(learner.lineage, k, UNITS_PER_BATCH))
        kept = {unit.group_id for unit in again.units} & set(gone)
        assert not kept, f"I13: units {kept} are still claimed after they were dropped as {reason}"
    return not gone


def _drop(world: World, call: Operation[int], reason: str) -> None:
    world.dropped[reason] += world.tell(call)


def _unscored(world: World, task: int, record: bytes) -> bytes:
    """What the actor had made of a record; asserts that it was scored, if it had to be."""
    assert record.endswith(SCORE) == world.has_teachers, f"S1: task {task} is trained as {record!r}"
    return record.removesuffix(SCORE)


def _lag_of(world: World, task: int, record: bytes) -> int:
    """Check what the record says of its making; returns the lag of its oldest token."""
    tokens = [tuple(map(int, token.split("."))) for token in record.decode().split()]
    assert [token[0] for token in tokens] == [task] * length_of(task, talks=world.talks(task)), (
        f"I3: {tokens}"
    )
    assert [token[2] for token in tokens] == list(range(len(tokens))), f"I3: {tokens}"
    fences = [token[1] for token in tokens]
    assert fences == sorted(fences), f"I4: {tokens}"
    return max(world.lag((token[3], token[4]), world.learner.step) for token in tokens)
