"""The fault matrix: fault after fault on one live run, a check after each, a table at the end.

A fault that the run does not come back from, or after which an invariant does not hold, costs its
own row alone: the next one gets a new run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import configs
from configs.errors import NyalaError
from console.run.process_guard import ProcessGuard

from .fault import Fault, FaultResult, as_json, markdown
from .fault_case import FaultCase
from .faults import clock_jumps, failover, network, partition, processes, stores
from .faults.disk import small_disk
from .invariants import Batches, trained_batches, violations
from .live_run import NEEDED, SMALL, LiveRun

FAULTS: tuple[Fault, ...] = (
    *processes.FAULTS,
    *stores.FAULTS,
    *failover.FAULTS,
    *network.FAULTS,
    *partition.FAULTS,
    *clock_jumps.FAULTS,
)
NUM_ACTORS = 3
GUARD_S = 10.0

OnProgress = Callable[[int, FaultResult | None, str], None]
"""Called with the number of finished rows, the newest of them, and what is done now."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of one matrix."""

    folder: Path
    """New; runs, logs and results go there."""
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = FAULTS
    num_actors: int = NUM_ACTORS

    @property
    def settings(self) -> tuple[Path, tuple[str, ...]]:
        """The settings file of the run and what is changed in it."""
        if self.config is not None:
            return self.config, (*NEEDED, *self.overrides)
        tiny = Path(configs.__file__).parent / "tiny.yaml"
        return tiny, (*NEEDED, *SMALL, *self.overrides)


def run_matrix(plan: Plan, on_progress: OnProgress) -> list[FaultResult]:
    """Carry the plan out and write `faults.md` and `faults.json` after every row."""
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
    (folder / "faults.md").write_text(markdown(rows), encoding="utf-8")
    text = json.dumps(as_json(rows), indent=1)
    (folder / "faults.json").write_text(text + "\n", encoding="utf-8")


@contextmanager
def live_run(plan: Plan, name: str, fault: Fault) -> Iterator[LiveRun]:
    """Start a run to hurt, and end it.

    Args:
        plan: Options of the matrix.
        name: Of the run.
        fault: The first one that it is for; it may ask for a place of its own.
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
    """Measure a fault on this run or, where its surroundings are not the fault's, on a new one.

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
        fault: What to inject.
        case: New, of the run to hurt.
        row: Of the fault.
        may_die: Tasks may become dead letters meanwhile: an actor of the run lies.
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
    """Check; once more after a moment, because files and store are not read at one instant."""
    found = violations(run, before, dead_before=dead)
    if found:
        time.sleep(1.0)
        found = violations(run, before, dead_before=dead)
    return found
