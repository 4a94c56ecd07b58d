"""Invariants checked after every fault, under the numbers of the delivery protocol.

I1 a task's state agrees with the set it is in; I2 no task is lost; I5 nothing is trained twice;
I6 batches are 1, 2, 3, ... without a hole; I7 a batch that was trained is replayed unchanged;
I13 no token is older than `run.max_policy_lag`, but in batches that an earlier life of the learner
had sealed: these are trained as they are, and count what was trained and lost between; I21 nothing
went to the dead letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from buffer import operations
from console.display.json_lines import Row, number, read_rows

from .live_run import LiveRun

Batches = dict[int, frozenset[int]]


def trained_batches(run: LiveRun) -> Batches:
    """Read which groups each batch of the surviving history was made of."""
    return {int(number(row, "step")): groups_of(row) for row in _rows(run, "batches")}


def violations(run: LiveRun, before: Batches, *, dead_before: float) -> list[str]:
    """Name what does not hold.

    Args:
        run: The run, after a fault.
        before: Batches trained before it.
        dead_before: Dead letters before it; infinite where tasks may die.
    """
    stats = run.stats()
    found = list(run.store.run(operations.audit()))
    if stats.accounted != stats.created:
        found.append(f"I2: {stats.created} tasks were created, {stats.accounted} are somewhere")
    found += history_violations([dict(row) for row in _rows(run, "batches")], before)
    lag = oldest_lag(_rows(run, "metrics"))
    if lag > run.settings.run.max_policy_lag:
        found.append(f"I13: a token was {lag:g} batches old when it was trained")
    if stats.dead > dead_before:
        found.append(f"I21: {stats.dead - dead_before} tasks went to the dead letters")
    return found


def history_violations(rows: list[Row], before: Batches) -> list[str]:
    """Judge the batches of a run: I5, I6 and I7."""
    steps = [int(number(row, "step")) for row in rows]
    groups = Counter(group for row in rows for group in groups_of(row))
    found = []
    if steps != list(range(1, len(steps) + 1)):
        found.append("I6: the batches are not 1, 2, 3, ...")
    twice = [group for group, count in groups.items() if count > 1]
    if twice:
        found.append(f"I5: groups trained twice: {twice[:5]}")
    after = {int(number(row, "step")): groups_of(row) for row in rows}
    changed = [step for step, ids in before.items() if step in after and after[step] != ids]
    if changed:
        found.append(f"I7: batches trained again with other groups: {changed[:5]}")
    return found


def oldest_lag(rows: Iterable[Row]) -> float:
    """Find the largest policy lag of batches that this life of their learner has sealed."""
    lags = [number(row, "policy_lag_max") for row in rows if not row.get("is_replay")]
    return max(lags, default=0)


def groups_of(row: Row) -> frozenset[int]:
    """Read the groups of one line of `batches.jsonl`."""
    ids = row.get("group_ids")
    return frozenset(ids) if isinstance(ids, list) else frozenset()


def _rows(run: LiveRun, name: str) -> list[Row]:
    return read_rows(run.folder.path / f"{name}.jsonl")
