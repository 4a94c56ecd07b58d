"""Reading operations: what the store must say of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from buffer.operations.keys import EVAL_BASE
from buffer.operations.values import (
    ClaimCounts,
    DeadLetter,
    DeadTask,
    EvalCounts,
    EvalRound,
    Stats,
    TaskSeen,
    WaitingUnit,
)
from tests.buffer.support.model.state import Claim, Model, by_age


def stats(model: Model) -> Stats:
    """Counts of everything."""
    fates = Counter(model.fates.values())
    states = Counter(task.state for i, task in model.tasks.items() if i < EVAL_BASE)
    held = {i: task for i, task in model.tasks.items() if task.state == "L"}
    scoring = [i for i, task in held.items() if task.teacher is not None]
    claimed = sum(len(model.finished(unit)) for c in model.claims.values() for unit in c.units)
    rounds = [model.rounds[key] for key in model.open_rounds()]
    leased = sum(model.tasks[i].state == "L" for found in rounds for i in found.unfinished)
    unfinished = sum(len(found.unfinished) for found in rounds)
    kept = model.kept.values()
    talks = model.conversations.values()
    hosted = [talk for talk in talks if talk.ticket is not None and talk.why is None]
    wanted = [talk.wanted_ms for talk in talks if talk.ticket is None]
    return Stats(
        state=model.state,
        lineage=model.lineage,
        version=model.version,
        committed_step=model.committed_step,
        hashes={"environment": "e"},
        created=len(model.known),
        ready=len(model.among_ready(None)) + len(model.new) * model.limits.group_size,
        leased=states["L"] - len(scoring),
        unscored={name: len(model.among_ready(None, name)) for name in model.teachers},
        scoring=len(scoring),
        buffered=states["D"] - claimed,
        claimed=claimed,
        committed=fates["committed"],
        dropped={reason: fates[f"dropped:{reason}"] for reason in model.reasons},
        dead=states["X"] + fates["purged"],
        cancelled=fates["cancelled"],
        new_units=len(model.new),
        open_units=len(model.open),
        buffered_units=len(model.buffer),
        claims=tuple(
            ClaimCounts(k, len(batch.units), batch.is_sealed, batch.starts or 0)
            for k, batch in sorted(model.claims.items())
        ),
        eval=EvalCounts(
            unfinished - leased,
            leased,
            sum(len(found.results) for found in rounds),
            sum(len(found.failed) for found in rounds),
        ),
        purged=fates["purged"],
        kept_units=sum(unit.batch is None for unit in kept),
        reused_units=sum(unit.batch is not None for unit in kept),
        kept_bytes=sum(unit.num_bytes for unit in kept),
        data_failures=model.data_failures,
        data_failure=model.data_failure or "",
        wanted=len(wanted),
        wanted_s=max([0, model.now_ms - min(wanted)]) / 1000 if wanted else 0.0,
        hosted=len(hosted),
        hosts=len({(talk.host, talk.key) for talk in hosted}),
    )


def inspect(model: Model, ids: Sequence[int]) -> dict[int, TaskSeen]:
    """State of live tasks; one of a unit that is not begun is ready."""
    seen = {}
    for i in ids:
        task = model.tasks.get(i)
        if task is not None:
            numbers = task.fence or 0, task.holder or "", task.length or 0, task.attempts or 0
            seen[i] = TaskSeen(i, task.state, *numbers)
        elif i < EVAL_BASE and model.unit_of(i) in model.new:
            seen[i] = TaskSeen(i, "R", 0, "", 0, 0)
    return seen


def dead_letters(model: Model) -> list[DeadLetter]:
    """The oldest first."""
    dead = [i for i, task in model.tasks.items() if task.state == "X"]
    return [_letter(model, i) for i in sorted(dead, key=lambda i: (model.tasks[i].died_ms, str(i)))]


def _letter(model: Model, i: int) -> DeadLetter:
    task = model.tasks[i]
    tried = (task.attempts or 0) + (task.failures or 0) + (task.losses or 0)
    return DeadLetter(i, task.died_ms, task.why or "", tried, task.length or 0)


def dead_letter(model: Model, i: int) -> DeadTask | None:
    """A dead letter with all that it keeps."""
    task = model.tasks.get(i)
    if task is None or task.state != "X":
        return None
    return DeadTask(
        _letter(model, i), task.holder or "", task.spec or b"", task.record, task.chunks
    )


def peek(model: Model, units: int) -> list[WaitingUnit]:
    """The oldest complete units."""
    waiting = by_age(model.buffer)[:units]
    return [WaitingUnit(unit, num_bytes(model, [unit]), model.finished(unit)) for unit in waiting]


def num_bytes(model: Model, units: Sequence[int]) -> int:
    """Of the records of some units."""
    tasks = [i for unit in units for i in model.finished(unit)]
    return sum(len(model.tasks[i].record or b"") for i in tasks)


def usage(model: Model) -> int:
    """Of a run's records and unfinished completions; so few tasks are all looked at."""
    tasks = [task for i, task in model.tasks.items() if i < EVAL_BASE]
    has_record = [t for t in tasks if t.state == "D" or (t.state in "RL" and t.teacher is not None)]
    records = sum(len(task.record or b"") for task in has_record)
    partials = sum(task.num_bytes or 0 for task in tasks if task.state in "RL")
    partials += sum(talk.num_bytes for i, talk in model.conversations.items() if i < EVAL_BASE)
    return records + partials + sum(unit.num_bytes for unit in model.kept.values())


def claim_bytes(model: Model, k: int) -> int:
    """Of the records of batch k."""
    return num_bytes(model, list(model.claims.get(k, Claim()).units))


def records(model: Model, ids: Sequence[int]) -> list[bytes | None]:
    """Records of training tasks; committed ones have them while their unit is kept."""
    kept = {i: record for unit in model.kept.values() for i, record in unit.tasks.items()}
    return [model.tasks[i].record if i in model.tasks else kept.get(i) for i in ids]


def eval_round(model: Model, key: tuple[int, int], ids: Sequence[int]) -> EvalRound:
    """A round so far, open or closed."""
    found = model.rounds.get(key)
    if found is None:
        return EvalRound(0, 0, 0, {})
    records = {i: found.results[i] for i in ids if i in found.results}
    return EvalRound(len(found.unfinished), len(found.failed), len(found.results), records)
