"""Units trained again in a random history: drawn for batches, judged, counted, trimmed.

R1: a unit is trained again only after an earlier batch trained it, once in a batch, and no more
often than it was kept for, in the surviving lineage. R2: a sealed batch keeps what it reuses. R3:
what is kept is committed, and its records are there.
"""

from __future__ import annotations

import random
from collections import Counter

import redis

from buffer import operations
from buffer.operations.values import ClaimedUnit, Rating
from tests.buffer.support import invariants
from tests.buffer.support.history_world import GROUP_SIZE, World

REUSED_UNITS = 3
MOST_UNITS = 12  # two commits' worth: with one, units used once would make way before another use


def draw(world: World, k: int, *, is_sealed: bool) -> list[int]:
    """Have kept units in batch k, and forget those whose records a rewind took.

    A learner that finds the batch sealed has other settings and asks for more, in vain.
    """
    learner = world.learner
    wanted = REUSED_UNITS + is_sealed
    numbers = [random.Random(f"{k} {i}").random() for i in range(wanted)]
    sampling = ("newest", "uniform", "prioritised")[k % 3]
    call = operations.reuse(learner.lineage, k, wanted, sampling=sampling, numbers=numbers)
    units = world.tell(call)
    found = [unit.group_id for unit in units]
    before = learner.drawn.get(k)
    assert before is None or found == before, f"R2: batch {k} reused {before}, now {found}"
    if before is None:
        for unit in units:
            if None in world.store.run(operations.records(unit.task_ids)):
                assert unit.group_id in world.reconciled, f"R3: {unit} has lost its records"
                world.tell(operations.forget_reused(learner.lineage, k, [unit.group_id]))
                found.remove(unit.group_id)
    learner.drawn[k] = found
    return found


def ratings(units: list[ClaimedUnit], k: int) -> list[Rating]:
    """How the units of batch k are to be kept."""
    return [
        Rating(unit, _most_uses(unit), k, float(unit % 5)) for unit in (u.group_id for u in units)
    ]


def _most_uses(unit: int) -> int:
    return 1 + unit % 2


def trim(world: World) -> None:
    """Only so many units are kept."""
    call = operations.trim_replay(
        world.learner.lineage, units=MOST_UNITS, num_bytes=10**9, born=0, memory_share=1.0
    )
    world.tell(call)


def recover(world: World) -> None:
    """The store keeps units only if it knows every use that the learner knows."""
    learner, durable = world.learner, len(world.learner.checkpoint)
    reused = dict(enumerate(learner.again[durable:], durable + 1))
    if world.tell(operations.check_replay(learner.lineage, durable, reused)):
        learner.drawn.clear()


def check(world: World, snapshot: invariants.Snapshot) -> None:
    """Assert R1 and R3."""
    learner = world.learner
    uses = Counter(unit for units in learner.again for unit in units)
    often = {unit: count for unit, count in uses.items() if count > _most_uses(unit)}
    assert not often, f"R1: units trained again too often: {often}"
    durable: set[int] = set()
    for k, (tasks, again) in enumerate(zip(learner.trained, learner.again, strict=True), 1):
        assert len(again) == len(set(again)), f"R1: batch {k} has {again}, one of them twice"
        early = set(again) - durable
        assert not early, f"R1: {early} were trained again before batch {k} contained them"
        durable |= {task // GROUP_SIZE for task in tasks}
    _check_kept(world.client, world.prefix, snapshot)


def _check_kept(client: redis.Redis, prefix: str, snapshot: invariants.Snapshot) -> None:
    kept, drawn = (invariants.zset(client, f"{prefix}:{key}") for key in ("replay", "reused"))
    assert not set(kept) & set(drawn), f"R1: {set(kept) & set(drawn)} are drawn and can be drawn"
    ages = invariants.zset(client, f"{prefix}:replay:age")
    assert sorted(ages) == sorted(kept), f"R3: {ages} have an age, {kept} are kept"
    total = 0
    for unit in [*kept, *drawn]:
        ids, num_bytes = client.hmget(f"{prefix}:x:{unit}", "ids", "bytes")
        assert isinstance(ids, bytes) and isinstance(num_bytes, bytes), f"R3: unit {unit} is empty"
        tasks = {int(task) for task in ids.split()}
        assert tasks and tasks <= snapshot.tasks["committed"], f"R3: unit {unit} is kept: {tasks}"
        lengths = sum(client.strlen(f"{prefix}:e:{task}") for task in tasks)
        assert lengths == int(num_bytes), f"R3: unit {unit} has {lengths} of {num_bytes!r} bytes"
        total += lengths
    counted = int(client.hget(f"{prefix}:meta", "kept_bytes") or 0)
    assert counted == total, f"R3: {counted} bytes are counted, {total} are kept"
