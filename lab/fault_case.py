"""One fault on a live run: its victim, its beginning and end, and the recovery.

    settle -> choose a victim by its state -> follow its tasks -> inject -> (lift) -> recover

`matrix.py` makes the case and settles it; a function of `faults/` then calls the other steps. The
case owns the clock of its row. Every wait has a limit, and during each the tasks are watched.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from buffer import operations
from buffer.operations.values import TaskSeen
from configs.errors import StoreError
from configs.markdown import table

from .actor_fleet import Actor
from .live_run import POLL_S, LiveRun
from .task_trace import Observer, TaskTrace

# --------------------------------------------------------------------------------------------------
# A fault, its measured result, and the table of results.

HEADER = (
    "fault",
    "detected after",
    "recovered after",
    "tokens kept",
    "attempts charged",
    "invariants",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the matrix."""

    name: str
    what: str
    """Description for the table."""
    act: Callable[[FaultCase], None]
    """Injects the fault and waits for the recovery."""
    obstacle: Callable[[], str | None] = lambda: None
    """Returns why the fault is impossible on this machine, or None."""
    place: Callable[[Path], AbstractContextManager[Mapping[str, str]]] | None = None
    """Makes the surroundings of a run in a folder, and yields variables for its processes; None =
    the fault can use any run."""
    overrides: tuple[str, ...] = ()
    """Settings of a run with these surroundings."""


@dataclass(slots=True)
class FaultResult:
    """Measurements of one fault: a row of the table."""

    name: str
    what: str
    detected_s: float | None = None
    """Time from the fault to the first reaction; None = no reaction was needed."""
    recovered_s: float | None = None
    """Time from the fault, or from the end of one that lasts, until all work goes on."""
    tokens_kept: float | None = None
    """Share of the tokens sampled before the fault that were continued."""
    tasks: int = 0
    """Unfinished episodes that the fault affected."""
    charged: int = 0
    """Number of these episodes that were charged an attempt."""
    violations: list[str] = field(default_factory=list)
    remark: str = ""
    skipped: str | None = None
    error: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the run recovered and every invariant held; true of a fault that was skipped."""
        return not self.violations and self.error is None

    def cells(self) -> tuple[str, ...]:
        """Write the cells of its row in the table."""
        if self.skipped is not None:
            return (self.what, "-", "-", "-", "-", f"not run: {self.skipped}")
        verdict = (
            "hold" if self.holds else "; ".join([*self.violations, *filter(None, [self.error])])
        )
        kept = "-" if self.tokens_kept is None else f"{self.tokens_kept:.1%}"
        charged = f"{self.charged} of {self.tasks}" if self.tasks else "-"
        times = (_seconds(self.detected_s), _seconds(self.recovered_s))
        what = f"{self.what} ({self.remark})" if self.remark else self.what
        return (what, *times, kept, charged, verdict)


def results_as_markdown(rows: Sequence[FaultResult]) -> str:
    """Write the rows as a table."""
    return table(HEADER, [row.cells() for row in rows]) + "\n"


def results_as_json(rows: Sequence[FaultResult]) -> list[dict[str, object]]:
    """Write the rows for a program."""
    return [_object(row) for row in rows]


def _object(row: FaultResult) -> dict[str, object]:
    return {**asdict(row), "holds": row.holds}


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


# --------------------------------------------------------------------------------------------------
# One fault on a live run: its victim, its beginning and end, and the recovery.

OBSERVE_S = 0.6  # of the growth of tasks, before a victim is chosen
VICTIM_TASKS = 6  # least unfinished episodes of a victim that have stored tokens
PROGRESS_STEPS = 2  # batches after the fault, which show that training goes on
ROLES = ("redis", "broker", "learner", "publisher")


class FaultCase:
    """The steps of which faults are written, and the measurements of one fault.

    A step that waits raises `ExpectationFailed` after its limit, as `LiveRun.until` does.
    """

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.trace = TaskTrace()
        self.remark = ""
        self.is_blind = False
        """Redis is about to be away, so the tasks are not read."""
        self.detected_s: float | None = None
        self.recovered_s: float | None = None
        self._observer = Observer(run.settings.actors.snapshot_s)
        self._sign: Callable[[], bool] | None = None
        self._began = self._measured_from = 0.0
        self._step = 0

    def settle(self) -> None:
        """Wait until the run is complete and at work, and observe how fast its tasks grow."""
        run = self.run
        run.until(
            lambda: all(run.pids(role) for role in ROLES) and run.fleet.all_serve(), "a whole run"
        )
        step = run.step
        run.until(lambda: run.step >= step + PROGRESS_STEPS, "training")
        self._observe_for(OBSERVE_S)

    def choose(self, among: Iterable[Actor] | None = None) -> Actor:
        """Wait until an actor is in the middle of episodes, and return it."""
        candidates = list(self.run.fleet.actors if among is None else among)
        busy: list[Actor] = []

        def is_busy() -> bool:
            tasks = self._leased()
            busy[:] = [a for a in candidates if len(_begun_by(tasks, a)) >= VICTIM_TASKS]
            return bool(busy)

        self.run.until(is_busy, f"an actor with {VICTIM_TASKS} unfinished episodes")
        return busy[0]

    def freeze(self, pid: int) -> None:
        """Stop a process, so that its state can be read before it is killed."""
        os.kill(pid, signal.SIGSTOP)
        stat = Path("/proc") / str(pid) / "stat"
        self.run.until(
            lambda: stat.read_text().rpartition(")")[2].split()[0] in "TtZ", "the stop of a process"
        )

    def follow(self, actors: Iterable[Actor] | None = None, *, is_orderly: bool = False) -> None:
        """Follow the tasks of these actors, or of all; orderly ones store tokens before they go."""
        names = None if actors is None else {actor.incarnation for actor in actors}
        held = [t for t in self._leased() if names is None or t.incarnation in names]
        self.trace = TaskTrace.from_tasks(
            held, self._observer, time.monotonic(), is_orderly=is_orderly
        )

    def inject(self, act: Callable[[], None], sign: Callable[[], bool] | None = None) -> None:
        """Begin the fault, and measure from now on.

        Args:
            act: Injects the fault.
            sign: Returns whether the run has reacted; None = whether a followed task was taken.
        """
        self._step = max(self._step, self.run.step)
        self._sign = sign or (lambda: self.trace.any_moved)
        self._began = self._measured_from = time.monotonic()
        act()

    def pause(self, seconds: float) -> None:
        """Let the fault last for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()
            self.run.sleep(POLL_S)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition while following the tasks; `what` names it, as a noun."""
        self.run.until(condition, what, look=self._look)

    def lift(self, act: Callable[[], None]) -> None:
        """End the fault; recovery is measured from here."""
        act()
        self.is_blind = False
        self._measured_from = time.monotonic()

    def recover(self) -> None:
        """Wait until all followed work goes on, all processes run and batches are trained again."""
        run = self.run
        self.until(lambda: not self.trace.open_ids, "a new holder of all work of the victims")
        self.until(lambda: all(run.pids(role) for role in ROLES), "all processes")
        self.until(lambda: run.step >= self._step + PROGRESS_STEPS, "further batches")
        self.recovered_s = time.monotonic() - self._measured_from

    def restarted(self, role: str) -> Callable[[], bool]:
        """Return a function that tells whether a process of the role has started since now."""
        old = set(self.run.pids(role))
        return lambda: bool(set(self.run.pids(role)) - old)

    def _leased(self) -> list[TaskSeen]:
        """Read the leased tasks, and note how far they are; none while the store is away."""
        try:
            tasks = list(self.run.store.run(operations.inspect()).values())
        except StoreError:
            return []
        self._observer.note(tasks, time.monotonic())
        return tasks

    def _observe_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._leased()
            self.run.sleep(POLL_S)

    def _look(self) -> None:
        """Replace dead actors, note the followed tasks, and look for the sign of the fault."""
        self.run.fleet.refill()
        if self.is_blind:
            return
        if self.trace.open_ids:
            try:
                seen = self.run.store.run(operations.inspect(self.trace.open_ids))
            except StoreError:
                return
            self.trace.note_open(seen, time.monotonic())
        if self.detected_s is None and self._sign is not None and self._sign():
            self.detected_s = time.monotonic() - self._began


def _begun_by(tasks: Iterable[TaskSeen], actor: Actor) -> list[TaskSeen]:
    """Return the tasks of an actor that have stored tokens."""
    return [t for t in tasks if t.incarnation == actor.incarnation and t.length > 0]
