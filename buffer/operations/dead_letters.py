r"""Dead letters: tasks that failed too often, and batches that killed their learners.

    failing --too often--> dead letter --requeue_dead--> ready again, or its whole unit again
                               \--purge_dead--> one bit; it stays counted as dead

A dead letter keeps everything: why it died, its spec, the tokens that it had, and of a poisonous
batch the finished record. Only operators requeue or purge it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .operation import Operation, Reply, single, sliced
from .replies import parse_dead_letter, parse_dead_task, parse_verdicts
from .values import DeadLetter, DeadTask, WaitingUnit

IDS_PER_CALL = 64
"""Each may stand for a unit of several tasks."""


def dead_letters(offset: int = 0, n: int = 50) -> Operation[list[DeadLetter]]:
    """List dead letters, the oldest first."""
    return single("dead_letters", (offset, n), lambda reply: [parse_dead_letter(x) for x in reply])


def dead_letter(task_id: int) -> Operation[DeadTask | None]:
    """Read a dead letter with all that it keeps; None if this task is none."""
    return single("dead_letter", (task_id,), parse_dead_task)


def requeue_dead(task_ids: Sequence[int]) -> Operation[list[str]]:
    """Try dead letters again.

    Returns:
        One verdict each. READY: it is made again, from the tokens it had, for its waiting unit.
        ANEW: its unit had ended, so all members begin again. TRAINED: its unit is in a batch, which
        went on without it. ENDED: the run is over. GONE: it is no dead letter (any more).
        FORGOTTEN: Redis lost its spec, and no member of its unit has one.
    """
    return sliced("requeue_dead", (), [(i,) for i in task_ids], parse_verdicts, size=IDS_PER_CALL)


def purge_dead(task_ids: Sequence[int]) -> Operation[list[str]]:
    """Delete dead letters for good: PURGED, or GONE for what is none; they still count as dead."""
    return sliced("purge_dead", (), [(i,) for i in task_ids], parse_verdicts, size=IDS_PER_CALL)


def peek(units: int) -> Operation[list[WaitingUnit]]:
    """List the oldest complete units that no batch has claimed, without taking them."""

    def parse(reply: Reply) -> list[WaitingUnit]:
        return [
            WaitingUnit(int(gid), num_bytes, [int(i) for i in ids])
            for gid, num_bytes, *ids in reply
        ]

    return single("peek", (units,), parse)
