"""Replay of trained units: kept at COMMIT, drawn for later batches, forgotten.

    seal(k, ratings) -> commit(k): kept -> reuse(k + n): in a batch -> commit(k + n): kept or gone

A kept unit is committed: creation, admission and conservation do not count it. What batch k drew
stays in it until the batch is committed or abandoned, so a replay of the batch is the same. Each
unit is in one batch at a time, at most `uses` times in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .operation import Call, Operation, Reply, Steps, repeated, single
from .values import ReusedUnit

DRAWS_PER_CALL = 200
"""Units that one call draws: each takes the server some microseconds."""

UNITS_PER_CALL = 32
"""Kept units that one call deletes, records and all."""


def reuse(
    lineage: int, k: int, units: int, *, sampling: str, numbers: Sequence[float]
) -> Operation[list[ReusedUnit]]:
    """Draw kept units for batch k until it has `units`; returns what it has.

    Each draw costs O(log n) of n kept units: it takes one rank of a sorted set.

    Args:
        lineage: Of the learner.
        k: The batch; once it is sealed it gets no more.
        units: How many, as far as there are so many.
        sampling: `newest` takes the first of the order that the ratings give, `uniform` any with
            equal probability, `prioritised` the one of rank r with about 1 / (r + 1).
        numbers: Uniform in [0, 1), one for each draw.
    """

    def steps() -> Steps[list[ReusedUnit]]:
        reply: Reply = []
        for first in range(0, max(units, 1), DRAWS_PER_CALL):
            part = numbers[first : first + DRAWS_PER_CALL]
            reply = yield Call("reuse", (lineage, k, units, sampling, *part))
        return [
            ReusedUnit(int(gid), uses, tuple(int(task) for task in ids))
            for gid, uses, *ids in reply
        ]

    return Operation("reuse", steps)


def forget_reused(lineage: int, k: int, group_ids: Sequence[int]) -> Operation[int]:
    """Take kept units out of the unsealed batch k for good; returns how many that were."""
    return single("forget_reused", (lineage, k, *group_ids), int)


def trim_replay(
    lineage: int, *, units: int, num_bytes: int, born: int, memory_share: float
) -> Operation[int]:
    """Forget the oldest kept units until the rest is within bounds; returns how many went.

    Args:
        lineage: Of the learner.
        units: Most units, those that batches have drawn included.
        num_bytes: Most bytes of their records.
        born: Units of an older version than this one go.
        memory_share: Used share of Redis' maxmemory above which units go, whatever their number.
    """
    return repeated("trim_replay", (lineage, units, num_bytes, born, memory_share, UNITS_PER_CALL))


def clear_replay(lineage: int) -> Operation[int]:
    """Forget all kept units, those that batches have drawn included; returns how many."""
    return repeated("clear_replay", (lineage, UNITS_PER_CALL))


def check_replay(
    lineage: int, checkpoint_step: int, reused: Mapping[int, Sequence[int]]
) -> Operation[int]:
    """After the store lost writes: forget all kept units if it lacks a use of any.

    Else a unit could be trained more often than it may be.

    Args:
        lineage: Of the learner.
        checkpoint_step: Batches inside its newest durable checkpoint.
        reused: For each batch since then, which groups it reused.

    Returns:
        How many units were forgotten.
    """
    rows = [x for k, groups in sorted(reused.items()) for x in (k, len(groups), *groups)]

    def steps() -> Steps[int]:
        is_whole = yield Call("replay_is_whole", (lineage, checkpoint_step, *rows))
        return 0 if is_whole else (yield from clear_replay(lineage).steps())

    return Operation("check_replay", steps)
