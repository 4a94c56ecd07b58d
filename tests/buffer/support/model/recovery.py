"""Tasks, recovery, and the operator's calls, as the store must carry them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from buffer.operations.values import NewTask, StaleMask
from tests.buffer.support.model.state import RESUMED, Claim, Model, Refused, Round, Task


def create(model: Model, lineage: int, units: Mapping[int, Sequence[bytes]]) -> int:
    """A unit that was ever created is left alone, whatever became of it."""
    model.check_learner(lineage)
    created = 0
    for unit, specs in units.items():
        members = model.members(unit)
        if members[0] not in model.known:
            model.new[unit] = list(specs)
            model.known |= set(members)
            created += len(members)
    return created


def create_eval(model: Model, lineage: int, tasks: Sequence[NewTask]) -> int:
    """Tasks of evaluation rounds, each a unit of its own outside admission."""
    model.check_learner(lineage)
    created = 0
    for task in tasks:
        assert task.eval_step is not None
        key = (lineage, task.eval_step)
        found = model.rounds.get(key)
        if task.task_id in model.tasks or (found and task.task_id in found.results):
            continue
        if found is None:
            found = model.rounds[key] = Round()
        found.is_open = True
        found.unfinished.add(task.task_id)
        model.tasks[task.task_id] = Task(task.spec, place=task.task_id, round=key)
        created += 1
    return created


def close_eval(model: Model, lineage: int, step: int) -> int:
    """End a round; returns how many tasks were unfinished."""
    model.check_learner(lineage)
    return model.close_round((lineage, step))


def recreate_dropped(model: Model, lineage: int, groups: Mapping[int, int | None]) -> None:
    """Note which group repeats the prompt of a dropped one."""
    model.check_learner(lineage)
    model.recreated |= groups


def cancel(model: Model, lineage: int) -> int:
    """End the run: what is not trained is cancelled."""
    model.check_learner(lineage)
    model.state = "ENDED"
    units = [*model.new, *model.open, *model.buffer]
    for k in [k for k in model.claims if k > model.version]:
        units += model.claims.pop(k).units
    cancelled = sum(model.end_unit(unit, "cancelled") for unit in units)
    model.close_all_rounds()
    return cancelled


def confirm(model: Model, server: str) -> str:
    """Another server than the confirmed one may have lost its last seconds."""
    if model.confirmed_server == server:
        return model.state
    model.server = server
    if model.state != "ENDED":
        model.state = "RECOVERING"
    return model.state


def recovered(model: Model, lineage: int, server: str) -> int:
    """Leases may be reaped again when one lease's time has passed."""
    model.check_learner(lineage)
    if model.server != server:
        raise Refused(f"RESTARTED {model.server}")
    grace_ms = model.lease_ms or 0
    model.confirmed_server, model.state = server, "RUNNING"
    model.grace_until_ms = model.now_ms + grace_ms
    return grace_ms


def reconcile(
    model: Model,
    lineage: int,
    k: int,
    units: Sequence[int],
    *,
    sealed: bool,
    mask: StaleMask | None,
) -> int:
    """The units that batch k has for the learner are in its claim, in order; others leave it."""
    model.check_learner(lineage)
    batch = model.claims.get(k, Claim())
    for unit in [unit for unit in batch.in_order() if batch.units[unit] < 0]:
        batch.units[unit] = model.next_arrival()
    moved = 0
    for at, unit in enumerate(units):
        if _is_committed(model, unit):
            continue
        _withdraw_unit(model, unit)
        for i in _without_dead(model, unit):
            _withdraw_task(model, i)
            task = model.tasks.setdefault(i, Task(None))
            task.state, task.is_reconciled = "D", True
        batch = model.claims.setdefault(k, Claim())
        batch.units[unit] = at - len(units)
        moved += 1
    batch = model.claims.get(k, Claim())
    for unit in [unit for unit, arrival in batch.units.items() if arrival >= 0]:
        model.buffer[unit] = batch.units.pop(unit)
    if not batch.units:
        model.remove_claim(k)
    elif sealed:
        batch.is_sealed, batch.mask = True, mask
    return moved


def restore_committed(model: Model, lineage: int, units: Sequence[int]) -> int:
    """They are in a durable checkpoint, wherever this store has them."""
    model.check_learner(lineage)
    restored = 0
    for unit in units:
        if _is_committed(model, unit):
            continue
        _withdraw_unit(model, unit)
        for i in _without_dead(model, unit):
            _withdraw_task(model, i)
            model.tasks.pop(i, None)
            model.fates[i] = "committed"
        restored += 1
    return restored


def _is_committed(model: Model, unit: int) -> bool:
    return any(model.fates.get(i) == "committed" for i in model.members(unit))


def _without_dead(model: Model, unit: int) -> list[int]:
    """A batch is trained without dead members; a unit of dead ones only was revived, and lost."""
    members = model.members(unit)
    alive = [i for i in members if not model.is_dead(i)]
    return alive or members


def _withdraw_unit(model: Model, unit: int) -> None:
    """Out of its place; a batch that loses a unit is open again, and gone when it is empty."""
    if unit in model.new:
        for i, spec in zip(model.members(unit), model.new.pop(unit), strict=True):
            model.tasks[i] = Task(spec)
        return
    if model.open.pop(unit, None) is not None or model.buffer.pop(unit, None) is not None:
        return
    for k, batch in list(model.claims.items()):
        if batch.units.pop(unit, None) is not None:
            batch.is_sealed = False
            if not batch.units:
                model.remove_claim(k)


def _withdraw_task(model: Model, i: int) -> None:
    model.conversations.pop(i, None)
    model.fates.pop(i, None)
    model.known.add(i)
    task = model.tasks.get(i)
    if task is not None and task.teacher is not None:  # nobody may train it without its score
        task.record = task.teacher = None


def requeue_dead(model: Model, ids: Sequence[int]) -> list[str]:
    """An operator tries dead letters again."""
    return [_requeue(model, i) for i in ids]


def _requeue(model: Model, i: int) -> str:
    if i not in model.tasks or model.tasks[i].state != "X":
        return "GONE"
    unit = model.unit_of(i)
    members = model.members(unit)
    claimed = any(unit in batch.units for batch in model.claims.values())
    if (claimed and model.finished(unit)) or _is_committed(model, unit):
        return "TRAINED"
    if model.state == "ENDED":
        return "ENDED"
    if unit in model.open or unit in model.buffer:
        old = model.tasks[i]
        model.tasks[i] = Task(
            old.spec,
            holder=old.holder,
            key=old.key,
            place=RESUMED,
            length=old.length,
            chunks=old.chunks,
            num_bytes=old.num_bytes,
            num_bytes_given=old.num_bytes_given,
            length_given=old.length_given,
            last_fence=old.last_fence,
            oldest=old.oldest,
            progress_ms=old.progress_ms,
            is_reconciled=old.is_reconciled,
            teacher=old.teacher,
            made=old.made,
            record=None if old.teacher is None else old.record,
        )
        model.buffer.pop(unit, None)
        model.open.setdefault(unit, set()).add(i)
        return "READY"
    return _begin_anew(model, i, unit, members)


def _begin_anew(model: Model, i: int, unit: int, members: list[int]) -> str:
    specs = [model.tasks[member].spec if member in model.tasks else None for member in members]
    known = model.tasks[i].spec or next((spec for spec in specs if spec is not None), None)
    if known is None:
        return "FORGOTTEN"
    for member in members:
        _withdraw_task(model, member)
        model.tasks.pop(member, None)
    model.new[unit] = [known if spec is None else spec for spec in specs]
    return "ANEW"


def purge_dead(model: Model, ids: Sequence[int]) -> list[str]:
    """Of a purged dead letter one bit is left."""
    verdicts = []
    for i in ids:
        if i in model.tasks and model.tasks[i].state == "X":
            del model.tasks[i]
            model.fates[i] = "purged"
            verdicts.append("PURGED")
        else:
            verdicts.append("GONE")
    return verdicts
