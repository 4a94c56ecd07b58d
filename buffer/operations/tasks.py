"""Tasks: their creation, evaluation rounds, and the end of a run, for the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.errors import RecordError

from .keys import EVAL_BASE, MAX_TRAINING_TASKS
from .operation import (
    SLICE,
    Argument,
    Call,
    Operation,
    Reply,
    Steps,
    nothing,
    repeated,
    single,
    sliced,
)
from .values import EvalRound, NewTask


def create(lineage: int, tasks: Sequence[NewTask]) -> Operation[int]:
    """Create the tasks that the store does not have; returns how many.

    Training tasks come in whole groups: group g has the ids g * group_size and those after it.

    Raises:
        RecordError: at once, for ids that break these rules.
    """
    rows = _group_rows([task for task in tasks if task.eval_step is None])
    rounds: dict[int, list[tuple[int, bytes]]] = {}
    for task in tasks:
        if task.eval_step is not None:
            if task.task_id < EVAL_BASE:
                raise RecordError(f"evaluation ids must be >= 2**48, got {task.task_id}")
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
    """Note which groups were too old, and the group that repeats each one's prompt; None = not yet.

    Kept in `again`, beside the counts of drops.
    """
    rows = [(dropped, "" if group is None else group) for dropped, group in groups.items()]
    return sliced("recreate_dropped", (lineage,), rows, nothing)


def recreations() -> Operation[dict[int, int | None]]:
    """Read what `recreate_dropped` noted, in no order."""

    def parse(reply: Reply) -> dict[int, int | None]:
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return {int(dropped): int(group) if group else None for dropped, group in pairs}

    return single("recreations", (), parse)


def known_tasks() -> Operation[bytes]:
    """Read which training tasks were ever created: one bit each, the first in the highest place."""
    return single("bits", ("known",), bytes)


def committed_tasks() -> Operation[bytes]:
    """Read which training tasks are inside a durable checkpoint, as `known_tasks`."""
    return single("bits", ("committed",), bytes)


def eval_round(lineage: int, step: int, task_ids: Sequence[int] = ()) -> Operation[EvalRound]:
    """Count the tasks of an evaluation round, and read the records of those given, as far as done.

    The records stay for an hour after the round is closed.
    """

    def steps() -> Steps[EvalRound]:
        records: dict[int, bytes] = {}
        unfinished = failed = done = 0
        for start in range(0, max(1, len(task_ids)), SLICE):
            part = task_ids[start : start + SLICE]
            unfinished, failed, done, found = yield Call("eval_round", (lineage, step, *part))
            pairs = zip(part, found, strict=True)
            records |= {task: record for task, record in pairs if record is not None}
        return EvalRound(unfinished, failed, done, records)

    return Operation("eval_round", steps)


def close_eval(lineage: int, step: int) -> Operation[int]:
    """End an evaluation round; returns how many unfinished tasks it removed."""
    return single("close_eval", (lineage, step), int)


def cancel(lineage: int) -> Operation[int]:
    """End the run: cancel all that is not trained, evaluations too; returns the training tasks."""
    return repeated("cancel", (lineage, SLICE))


def _group_rows(tasks: Sequence[NewTask]) -> list[list[Argument]]:
    """One row per group: its id, then the specs of its members in order."""
    groups: dict[int, dict[int, bytes]] = {}
    for task in tasks:
        if not 0 <= task.task_id < MAX_TRAINING_TASKS:
            raise RecordError(f"training ids must be below 2**32, got {task.task_id}")
        groups.setdefault(task.group_id, {})[task.task_id] = task.spec
    size = len(next(iter(groups.values()), ()))
    for group, specs in groups.items():
        if sorted(specs) != list(range(group * size, group * size + size)):
            raise RecordError(
                f"group {group} must have the tasks {group * size} and the {size - 1} after it, "
                f"got {sorted(specs)[:8]}; create groups whole"
            )
    return [[group, *(specs[i] for i in sorted(specs))] for group, specs in groups.items()]
