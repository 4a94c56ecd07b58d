"""The fault matrix: fault after fault on one live run, a check after each, a table at the end.

`nyala chaos` runs it; an endurance run measures its faults with `measure` too.

If the run does not come back from a fault, or an invariant does not hold after it, only that row is
lost: the next fault gets a new run.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import configs
from buffer import operations
from configs.errors import NyalaError
from configs.json_lines import Row, number, read_rows
from console.run.process_guard import ProcessGuard

from .fault_case import Fault, FaultCase, FaultResult, results_as_json, results_as_markdown
from .faults import clock_jumps, conversations, network, processes, stores
from .faults.stores import small_disk
from .live_run import NEEDED, SMALL, LiveRun

# --------------------------------------------------------------------------------------------------
# Invariants checked after every fault, under the numbers of the delivery protocol.
#
# I1 a task's state agrees with the set it is in; I2 no task is lost; I5 nothing is trained twice;
# I6 batches are 1, 2, 3, ... without a hole; I7 a batch that was trained is replayed unchanged;
# I13 no token is older than `run.max_policy_lag`, except in batches that an earlier life of the
# learner had sealed: these are trained as they are, and count batches trained and lost in between;
# I21 nothing went to the dead letters.

Batches = dict[int, frozenset[int]]


def trained_batches(run: LiveRun) -> Batches:
    """Read the groups of each batch of the surviving history."""
    return {int(number(row, "step")): groups_of(row) for row in _rows(run, "batches")}


def violations(run: LiveRun, before: Batches, *, dead_before: float) -> list[str]:
    """Return the invariants that do not hold, a sentence each.

    Args:
        run: The run, after a fault.
        before: Batches trained before it.
        dead_before: Dead letters before it; infinite where tasks may die.
    """
    stats = run.stats()
    broken = list(run.store.run(operations.audit()))
    if stats.accounted != stats.created:
        broken.append(f"I2: {stats.created} tasks were created, {stats.accounted} are somewhere")
    broken += history_violations([dict(row) for row in _rows(run, "batches")], before)
    lag = oldest_lag(_rows(run, "metrics"))
    if lag > run.settings.run.max_policy_lag:
        broken.append(f"I13: a token was {lag:g} batches old when it was trained")
    if stats.dead > dead_before:
        broken.append(f"I21: {stats.dead - dead_before} tasks went to the dead letters")
    return broken


def history_violations(rows: list[Row], before: Batches) -> list[str]:
    """Check the batches of a run: I5, I6 and I7."""
    steps = [int(number(row, "step")) for row in rows]
    groups = Counter(group for row in rows for group in groups_of(row))
    broken = []
    if steps != list(range(1, len(steps) + 1)):
        broken.append("I6: the batches are not 1, 2, 3, ...")
    twice = [group for group, count in groups.items() if count > 1]
    if twice:
        broken.append(f"I5: groups trained twice: {twice[:5]}")
    after = {int(number(row, "step")): groups_of(row) for row in rows}
    changed = [step for step, ids in before.items() if step in after and after[step] != ids]
    if changed:
        broken.append(f"I7: batches trained again with other groups: {changed[:5]}")
    return broken


def oldest_lag(rows: Iterable[Row]) -> float:
    """Return the largest policy lag of batches that this life of their learner has sealed."""
    lags = [number(row, "policy_lag_max") for row in rows if not row.get("is_replay")]
    return max(lags, default=0)


def groups_of(row: Row) -> frozenset[int]:
    """Read the groups of one line of `batches.jsonl`."""
    ids = row.get("group_ids")
    return frozenset(ids) if isinstance(ids, list) else frozenset()


def _rows(run: LiveRun, name: str) -> list[Row]:
    return read_rows(run.folder.path / f"{name}.jsonl")


# --------------------------------------------------------------------------------------------------
# The fault matrix: fault after fault on one live run, a check after each, a table at the end.

FAULTS: tuple[Fault, ...] = (
    *processes.FAULTS,
    *stores.FAULTS,
    *network.FAULTS,
    *clock_jumps.FAULTS,
    *conversations.FAULTS,
)
NUM_ACTORS = 3
GUARD_S = 10.0

OnProgress = Callable[[int, FaultResult | None, str], None]
"""Called with the number of finished rows, the newest row, and the present step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of one matrix."""

    folder: Path
    """A new folder for runs, logs and results."""
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = FAULTS
    num_actors: int = NUM_ACTORS

    @property
    def settings(self) -> tuple[Path, tuple[str, ...]]:
        """The settings file of the run and its overrides."""
        if self.config is not None:
            return self.config, (*NEEDED, *self.overrides)
        tiny = Path(configs.__file__).parent / "tiny.yaml"
        return tiny, (*NEEDED, *SMALL, *self.overrides)


def run_matrix(plan: Plan, on_progress: OnProgress) -> list[FaultResult]:
    """Carry the plan out and write `faults.md` and `faults.json` after every row.

    A fault from which the run does not come back has the error in its row.

    Raises:
        FileExistsError: `plan.folder` exists.
    """
    plan.folder.mkdir(parents=True)
    rows: list[FaultResult] = []
    run: LiveRun | None = None
    with ExitStack() as runs:
        for fault in plan.faults:
            on_progress(len(rows), rows[-1] if rows else None, fault.what)
            row = FaultResult(fault.name, fault.what, skipped=fault.obstacle())
            if row.skipped is None:
                run = _measure_on(run, runs, plan, fault, row)
            rows.append(row)
            write(plan.folder, rows)
        on_progress(len(rows), rows[-1] if rows else None, "stopping")
    return rows


def write(folder: Path, rows: Sequence[FaultResult]) -> None:
    """Write the table for people and for programs."""
    (folder / "faults.md").write_text(results_as_markdown(rows), encoding="utf-8")
    text = json.dumps(results_as_json(rows), indent=1)
    (folder / "faults.json").write_text(text + "\n", encoding="utf-8")


@contextmanager
def live_run(plan: Plan, name: str, fault: Fault) -> Iterator[LiveRun]:
    """Start a run to hurt, and end it.

    Args:
        plan: Options of the matrix.
        name: Name of the run.
        fault: The first fault on the run, which may need surroundings of its own.

    Raises:
        ExpectationFailed: The run does not train.
    """
    config, overrides = plan.settings
    folder = plan.folder / name
    place = fault.place(plan.folder) if fault.place is not None else nullcontext({})
    with (
        closing(ProcessGuard(grace_s=GUARD_S)) as guard,
        place as more,
        small_disk(folder / "redis"),
    ):
        run = LiveRun(config, (*overrides, *fault.overrides), folder, guard, more)
        run.place = fault.place
        with closing(run):
            run.start(plan.num_actors)
            yield run


def _measure_on(
    run: LiveRun | None, runs: ExitStack, plan: Plan, fault: Fault, row: FaultResult
) -> LiveRun | None:
    """Measure a fault on this run, or on a new one if the fault needs other surroundings.

    Returns:
        The run for the next fault; None if it has ended.
    """
    try:
        if run is None or run.place is not fault.place:
            runs.close()
            run = runs.enter_context(live_run(plan, f"ring-{fault.name}", fault))
        measure(fault, FaultCase(run), row)
    except (NyalaError, OSError) as error:  # as of a victim that had just died by itself
        row.error = str(error)
    if row.holds:
        return run
    runs.close()
    return None


def measure(fault: Fault, case: FaultCase, row: FaultResult, *, may_die: bool = False) -> None:
    """Inject a fault and fill its row, also where the run does not come back from it.

    Args:
        fault: Fault to inject.
        case: A new case of the run to hurt.
        row: Row of the fault in the table.
        may_die: Tasks may become dead letters, because an actor of the run lies.

    Raises:
        NyalaError: The run does not come back.
        OSError: A victim had just ended by itself.
    """
    run = case.run
    try:
        case.settle()
        before, dead = trained_batches(run), math.inf if may_die else run.stats().dead
        fault.act(case)
        row.violations = _settled_violations(run, before, dead=dead)
    finally:
        row.detected_s, row.recovered_s = case.detected_s, case.recovered_s
        row.tokens_kept, row.charged = case.trace.kept_share, case.trace.charged
        row.tasks, row.remark = len(case.trace.tasks), case.remark


def _settled_violations(run: LiveRun, before: Batches, *, dead: float) -> list[str]:
    """Check twice if needed, because files and store are not read at one instant."""
    broken = violations(run, before, dead_before=dead)
    if broken:
        time.sleep(1.0)
        broken = violations(run, before, dead_before=dead)
    return broken
