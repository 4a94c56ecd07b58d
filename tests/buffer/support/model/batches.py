"""Operations of the learner, on batches and their reuse, as the store must carry them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from buffer.operations.values import Claim as ClaimAnswer
from buffer.operations.values import ClaimedUnit, Rating, ReusedUnit, StaleMask
from tests.buffer.support.model.state import Claim, Kept, Model, Refused, by_age


def begin_lineage(
    model: Model, expected: int, fork_step: int, *, owner: str, at_least: int
) -> int | None:
    """Another learner takes the run over at the step of its checkpoint."""
    lineage = max(expected + 1, at_least)
    if model.lineage == lineage and model.owner == owner:
        return lineage  # sent again
    if model.lineage != expected:
        return None
    if model.state == "ENDED":
        is_known = model.confirmed_server == model.server
        model.state = "RUNNING" if is_known else "RECOVERING"
    _take_over(model, lineage, fork_step, owner)
    for forgotten in range(expected + 1, lineage + 1):
        model.forks[forgotten] = fork_step
    return lineage


def restore_lineage(
    model: Model, lineage: int, step: int, *, owner: str, lineages: Mapping[int, int]
) -> bool:
    """The store forgot that this learner took the run over."""
    if model.lineage > lineage or (model.lineage == lineage and model.owner != owner):
        raise Refused(f"LOST {model.lineage}")
    model.forks |= lineages
    if model.lineage == lineage:
        return False
    _take_over(model, lineage, step, owner)
    return True


def _take_over(model: Model, lineage: int, step: int, owner: str) -> None:
    model.lineage, model.owner, model.version = lineage, owner, step
    model.committed_step = min(step, model.committed_step)
    model.close_all_rounds()


def claim(
    model: Model, lineage: int, k: int, units: int, *, start: bool, known: int, in_order: bool
) -> ClaimAnswer:
    """What batch k has stays in it; until it is sealed, complete units fill it up.

    The oldest, or in order of their ids those with the numbers of batch k.
    """
    model.check_learner(lineage)
    if model.state != "RUNNING":
        return ClaimAnswer(sealed=False, complete=False, starts=0, units=[])
    if k <= model.committed_step:
        raise Refused(f"COMMITTED {model.committed_step}")
    batch = model.claims.setdefault(k, Claim())
    if start:
        batch.starts = (batch.starts or 0) + 1
    held = len(batch.units)
    missing = 0 if batch.is_sealed else max(0, units - held)
    of_batch = [unit for unit in range((k - 1) * units, k * units) if unit in model.buffer]
    moved = (of_batch if in_order else by_age(model.buffer))[:missing]
    for unit in moved:
        age = model.buffer.pop(unit)
        batch.units[unit] = unit if in_order else age
    in_one_call = min(missing, model.limits.units_per_call) > len(moved)
    only_moved = len(moved) < missing and held == known
    listed = moved if only_moved and in_one_call else batch.in_order()
    found = [ClaimedUnit(unit, model.finished(unit)) for unit in listed]
    complete = batch.is_sealed or len(found) >= units
    mask = batch.mask if batch.is_sealed else None
    return ClaimAnswer(batch.is_sealed, complete, batch.starts or 0, found, mask)


def drop(model: Model, lineage: int, k: int, units: Sequence[int], reason: str) -> int:
    """Units leave an unsealed batch for good; returns how many tasks that were."""
    model.check_learner(lineage)
    _check_unsealed(model, k)
    found = model.claims.get(k, Claim()).units
    return sum(model.drop_unit(unit, reason) for unit in units if found.pop(unit, None) is not None)


def _check_unsealed(model: Model, k: int) -> None:
    if k in model.claims and model.claims[k].is_sealed:
        raise Refused(f"SEALED {k}")


def seal(
    model: Model, lineage: int, k: int, ratings: Sequence[Rating], *, mask: StaleMask | None
) -> int:
    """Every replay of batch k is the same from now on."""
    model.check_learner(lineage)
    batch = model.claims.get(k)
    if batch is None or not batch.units:
        raise Refused(f"UNCLAIMED {k}")
    batch.ratings |= {r.group_id: (r.uses, r.born, r.rank) for r in ratings}
    batch.is_sealed, batch.mask = True, mask
    return len(batch.units)


def abandon(model: Model, lineage: int, k: int, reason: str, *, to_dead_letters: bool) -> int:
    """Give up a batch that cannot be trained, sealed or not."""
    model.check_learner(lineage)
    if k <= model.version:
        raise Refused(f"TRAINED {model.version}")
    moved = 0
    for unit in model.claims.get(k, Claim()).in_order():
        if to_dead_letters:
            for i in model.finished(unit):
                task = model.tasks[i]
                task.state, task.why, task.died_ms = "X", reason, model.now_ms
                task.kept_record = task.record is not None
                moved += 1
        else:
            moved += model.drop_unit(unit, reason)
    for unit, kept in list(model.kept.items()):
        if kept.batch == k and to_dead_letters:
            del model.kept[unit]
        elif kept.batch == k:
            kept.batch = None
    model.remove_claim(k)
    return moved


def advance(model: Model, lineage: int, k: int) -> None:
    """Batch k is trained: its units hold back no new ones, and no learner died of it."""
    model.check_learner(lineage)
    if k < model.version:
        raise Refused(f"BACKWARDS {model.version}")
    model.version = k
    for number, batch in model.claims.items():
        if number <= k:
            batch.starts = None


def commit(model: Model, lineage: int, k: int) -> int:
    """All batches up to k are in a durable checkpoint."""
    model.check_learner(lineage)
    if k > model.version:
        raise Refused(f"UNTRAINED {model.version}")
    due = sorted(number for number in model.claims if number <= k)
    for number in due:
        if model.claims[number].units and not model.claims[number].is_sealed:
            raise Refused(f"UNSEALED {number}")
    committed = sum(_commit_batch(model, model.claims.pop(number)) for number in due)
    for unit, kept in list(model.kept.items()):
        if kept.batch is not None and kept.batch <= k:
            kept.uses, kept.batch = kept.uses + 1, None
            if kept.uses >= kept.most:
                del model.kept[unit]
    model.committed_step = max(k, model.committed_step)
    return committed


def _commit_batch(model: Model, batch: Claim) -> int:
    count = 0
    for unit in batch.in_order():
        trained = model.finished(unit)
        records = {i: model.tasks[i].record for i in trained}
        for i in trained:
            del model.tasks[i]
            model.fates[i] = "committed"
        if unit in batch.ratings:
            model.kept[unit] = Kept(records, *batch.ratings[unit])
        count += len(trained)
    return count


def publish(model: Model, lineage: int, step: int, fields: Mapping[str, str]) -> None:
    """Versions of a lineage only go up, and each has one digest."""
    model.check_learner(lineage)
    known = model.publication
    if known.get("lineage") == str(lineage):
        if step < int(known["step"]):
            raise Refused(f"BACKWARDS {known['step']}")
        if step == int(known["step"]) and fields["digest"] != known["digest"]:
            raise Refused(f"DIGEST {known['step']}")
    model.publication = {"lineage": str(lineage), "step": str(step), **fields}


def write_run_snapshot(model: Model, lineage: int, text: bytes) -> None:
    """The newest run snapshot takes the place of the one before."""
    model.check_learner(lineage)
    model.run_snapshot = text


def reuse(
    model: Model, lineage: int, k: int, units: int, *, sampling: str, numbers: Sequence[float]
) -> list[ReusedUnit]:
    """Draw kept units for batch k until it has so many; a sealed batch draws no more."""
    model.check_learner(lineage)
    drawn = [unit for unit, kept in model.kept.items() if kept.batch == k]
    is_sealed = k in model.claims and model.claims[k].is_sealed
    for number in numbers[: 0 if is_sealed else max(0, units - len(drawn))]:
        order = kept_in_order(model)
        if not order:
            break
        unit = order[min(model.draw_rank(sampling, number, len(order)), len(order) - 1)]
        model.kept[unit].batch = k
        drawn.append(unit)
    return [
        ReusedUnit(unit, model.kept[unit].uses, tuple(model.kept[unit].tasks))
        for unit in sorted(drawn, key=str)
    ]


def kept_in_order(model: Model) -> list[int]:
    """Units that may be drawn, in the order that their ratings give."""
    free = {unit: kept.rank for unit, kept in model.kept.items() if kept.batch is None}
    return sorted(free, key=lambda unit: (free[unit], str(unit)))


def forget_reused(model: Model, lineage: int, k: int, units: Sequence[int]) -> int:
    """Kept units that an unsealed batch drew and must not train are forgotten."""
    model.check_learner(lineage)
    _check_unsealed(model, k)
    found = [u for u in dict.fromkeys(units) if u in model.kept and model.kept[u].batch == k]
    for unit in found:
        del model.kept[unit]
    return len(found)


def trim_replay(model: Model, lineage: int, *, units: int, num_bytes: int, born: int) -> int:
    """The oldest kept units go until the rest is within bounds; those of a batch stay."""
    model.check_learner(lineage)
    forgotten = 0
    free = [unit for unit, kept in model.kept.items() if kept.batch is None]
    for unit in sorted(free, key=lambda unit: (model.kept[unit].born, str(unit))):
        total = sum(kept.num_bytes for kept in model.kept.values())
        within = len(model.kept) <= units and total <= num_bytes
        if within and model.kept[unit].born >= born:
            break
        del model.kept[unit]
        forgotten += 1
    return forgotten


def check_replay(
    model: Model, lineage: int, checkpoint_step: int, reused: Mapping[int, Sequence[int]]
) -> int:
    """After a rewind: kept units are forgotten unless the store has every use of them."""
    model.check_learner(lineage)
    batches = range(model.committed_step + 1, checkpoint_step + 1)
    is_whole = all(k in model.claims and model.claims[k].is_sealed for k in batches)
    for k, units in reused.items():
        drawn = {unit for unit, kept in model.kept.items() if kept.batch == k}
        is_whole = is_whole and drawn == set(units)
    if is_whole:
        return 0
    forgotten = len(model.kept)
    model.kept.clear()
    return forgotten
