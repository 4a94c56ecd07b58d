"""Tasks: creation, evaluation and end, for the learner; dead letters and states, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.errors import RecordError

from .keys import EVAL_BASE, MAX_TRAINING_TASKS
from .operation import (
    SLICE,
    Argument,
    Operation,
    Reply,
    ScriptCall,
    Steps,
    nothing,
    parse_dead_letter,
    parse_dead_task,
    parse_verdicts,
    repeated,
    single,
    sliced,
)
from .values import DeadLetter, DeadTask, EvalRound, NewTask, TaskSeen, WaitingUnit


def create(lineage: int, tasks: Sequence[NewTask]) -> Operation[int]:
    """Create the tasks that the store does not have; return how many.

    Training tasks come in whole groups: group g has `group_size` ids from g * group_size on.

    Raises:
        RecordError: At once, for ids that break these rules.
    """
    rows = _group_rows([task for task in tasks if task.eval_step is None])
    rounds: dict[int, list[tuple[int, bytes]]] = {}
    for task in tasks:
        if task.eval_step is not None:
            if task.task_id < EVAL_BASE:
                raise RecordError(
                    f"evaluation ids must be >= 2**48, got {task.task_id}; add EVAL_BASE"
                )
            rounds.setdefault(task.eval_step, []).append((task.task_id, task.spec))

    def steps() -> Steps[int]:
        created = 0
        if rows:
            size = len(rows[0]) - 1
            groups = yield from sliced(
                "create", (lineage, size), rows, sum, size=max(1, SLICE // size)
            ).steps()
            created += groups * size
        for step, members in rounds.items():
            created += yield from sliced("create_eval", (lineage, step), members, sum).steps()
        return created

    return Operation("create", steps)


def recreate_dropped(lineage: int, groups: Mapping[int, int | None]) -> Operation[None]:
    """Note groups that were too old, each with the group that repeats its prompt; None = not yet.

    They are kept in `again`, beside the counts of drops.
    """
    rows = [(dropped, "" if group is None else group) for dropped, group in groups.items()]
    return sliced("recreate_dropped", (lineage,), rows, nothing)


def recreations() -> Operation[dict[int, int | None]]:
    """Read the groups that `recreate_dropped` noted, in no order."""

    def parse(reply: Reply) -> dict[int, int | None]:
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return {int(dropped): int(group) if group else None for dropped, group in pairs}

    return single("recreations", (), parse)


def known_tasks() -> Operation[bytes]:
    """Read the training tasks that were ever created: one bit each, the first bit the highest."""
    return single("bits", ("known",), bytes)


def committed_tasks() -> Operation[bytes]:
    """Read the training tasks that are inside a durable checkpoint, as `known_tasks`."""
    return single("bits", ("committed",), bytes)


def eval_round(lineage: int, step: int, task_ids: Sequence[int] = ()) -> Operation[EvalRound]:
    """Count the tasks of an evaluation round, and read the records of these tasks that are done.

    The records stay for an hour after the round is closed.
    """

    def steps() -> Steps[EvalRound]:
        records: dict[int, bytes] = {}
        unfinished = failed = done = 0
        for start in range(0, max(1, len(task_ids)), SLICE):
            part = task_ids[start : start + SLICE]
            unfinished, failed, done, stored = yield ScriptCall(
                "eval_round", (lineage, step, *part)
            )
            pairs = zip(part, stored, strict=True)
            records |= {task: record for task, record in pairs if record is not None}
        return EvalRound(unfinished, failed, done, records)

    return Operation("eval_round", steps)


def close_eval(lineage: int, step: int) -> Operation[int]:
    """End an evaluation round; return how many unfinished tasks it removed."""
    return single("close_eval", (lineage, step), int)


def cancel(lineage: int) -> Operation[int]:
    """End the run: cancel all untrained tasks, evaluations too; return the training tasks."""
    return repeated("cancel", (lineage, SLICE))


def _group_rows(tasks: Sequence[NewTask]) -> list[list[Argument]]:
    """One row per group: its id, then the specs of its members in order."""
    groups: dict[int, dict[int, bytes]] = {}
    for task in tasks:
        if not 0 <= task.task_id < MAX_TRAINING_TASKS:
            raise RecordError(
                f"training ids must be from 0 to 2**32 - 1, got {task.task_id}; begin another run"
            )
        groups.setdefault(task.group_id, {})[task.task_id] = task.spec
    size = len(next(iter(groups.values()), ()))
    for group, specs in groups.items():
        if sorted(specs) != list(range(group * size, group * size + size)):
            raise RecordError(
                f"group {group} must have the tasks {group * size} and the {size - 1} after it, "
                f"got {sorted(specs)[:8]}; create groups whole"
            )
    return [[group, *(specs[i] for i in sorted(specs))] for group, specs in groups.items()]


# --------------------------------------------------------------------------------------------------
# Dead letters: tasks that failed too often, and batches that killed their learners.
#
#     failing --too often--> dead letter --requeue_dead--> ready again, or its whole unit again
#                                \--purge_dead--> one bit; it stays counted as dead
#
# A dead letter keeps the reason, its spec, its tokens, and the finished record if its batch was
# abandoned. Only operators requeue or purge it.

IDS_PER_CALL = 64
"""Dead letters of one call, each of which may stand for a unit of several tasks."""


def dead_letters(offset: int = 0, n: int = 50) -> Operation[list[DeadLetter]]:
    """List dead letters, the oldest first."""
    return single("dead_letters", (offset, n), lambda reply: [parse_dead_letter(x) for x in reply])


def dead_letter(task_id: int) -> Operation[DeadTask | None]:
    """Read a whole dead letter; None if the task is not one."""
    return single("dead_letter", (task_id,), parse_dead_task)


def requeue_dead(task_ids: Sequence[int]) -> Operation[list[str]]:
    """Try dead letters again.

    Returns:
        One verdict each. READY: the task goes on from its tokens, for its waiting unit. ANEW: its
        unit had ended, so all members begin again. TRAINED: its unit is in a batch, which went on
        without it. ENDED: the run is over. GONE: the task is no dead letter (any more). FORGOTTEN:
        Redis lost its spec, and no member of its unit has one.
    """
    return sliced("requeue_dead", (), [(i,) for i in task_ids], parse_verdicts, size=IDS_PER_CALL)


def purge_dead(task_ids: Sequence[int]) -> Operation[list[str]]:
    """Delete dead letters for good: PURGED, or GONE for other tasks; they still count as dead."""
    return sliced("purge_dead", (), [(i,) for i in task_ids], parse_verdicts, size=IDS_PER_CALL)


def peek(units: int) -> Operation[list[WaitingUnit]]:
    """List the oldest complete units that no batch has claimed, without taking them."""

    def parse(reply: Reply) -> list[WaitingUnit]:
        return [
            WaitingUnit(int(gid), num_bytes, [int(i) for i in ids])
            for gid, num_bytes, *ids in reply
        ]

    return single("peek", (units,), parse)


# --------------------------------------------------------------------------------------------------
# Inspection of single tasks and an audit of all; nothing is changed.
#
# `audit` reads every live task: it is for fault injection, not for a busy run.

MAX_NAMED = 20  # contradictions in one audit, enough to see the pattern


def inspect(task_ids: Sequence[int] = ()) -> Operation[dict[int, TaskSeen]]:
    """Read the state of these tasks, or of all leased ones; ended tasks are left out.

    A task of a unit that is not begun is ready: it has no fence yet.
    """

    def parse(reply: Reply) -> dict[int, TaskSeen]:
        seen = [
            TaskSeen(int(i), state.decode(), int(fence), inc.decode(), int(length), int(attempts))
            for i, state, fence, inc, length, attempts in reply
        ]
        return {task.task_id: task for task in seen}

    return single("inspect", task_ids, parse)


def audit() -> Operation[list[str]]:
    """Describe the live tasks whose own state contradicts the set that they are in."""

    def parse(reply: Reply) -> list[str]:
        return [
            f"task {int(task)} is in {place.decode()} and has state {state.decode()}"
            for task, place, state in reply
        ]

    return single("audit", (MAX_NAMED,), parse)
