"""An endurance run: random faults, one after the other, beside a lying actor.

`nyala chaos --minutes` makes one.

    start -> (a fault of the matrix, or a quiet minute) again and again -> complete again -> end

After every fault the invariants of the matrix are checked. Only tasks that the lying actor was
granted may die. At the end every task must have one state, no process, port or entry of /dev/shm
may be left, and no role's memory or descriptors may have grown steadily.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from buffer import operations
from buffer.operations.values import DeadLetter, TaskSeen
from configs.errors import NyalaError, StoreError
from console.run.process import Command, Process
from console.run.process_guard import ProcessGuard
from lab.actor_fleet import descendants, plays
from lab.fault_case import (
    ROLES,
    Fault,
    FaultCase,
    FaultResult,
    results_as_json,
    results_as_markdown,
)
from lab.faults import clock_jumps
from lab.live_run import ExpectationFailed, LiveRun
from lab.matrix import GUARD_S, Plan, live_run, measure

from . import growth, lying_actor
from .growth import ResourceCounts, ResourceSampler, RoleGrowth

QUIET_SHARE = 0.25
QUIET_S = 60.0
REPORT_MIN = 1.0
GONE_S = 15.0  # processes of a run that has been stopped
PAGE = 256
LEAVES = 3  # more processes, ports or entries than at first: a connection, a worker of a pool

OnProgress = Callable[[float, str], None]
"""Called with the minutes that have passed and a line about the run, or about a fault's end."""


@dataclass(slots=True)
class EnduranceResult:
    """The results of an endurance run."""

    minutes: float = 0.0
    rows: list[FaultResult] = field(default_factory=list)
    roles: list[RoleGrowth] = field(default_factory=list)
    first: ResourceCounts | None = None
    last: ResourceCounts | None = None
    tasks: dict[str, int] = field(default_factory=dict)
    """Tasks by state at the end, and `created`."""
    batches: int = 0
    granted_to_liar: int = 0
    left: list[str] = field(default_factory=list)
    """Processes and entries of /dev/shm that outlived the run."""
    problems: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the run came back from every fault and nothing was lost or grew."""
        return not self.problems and all(row.holds for row in self.rows)

    def judge(self) -> None:
        """Add the problems of tasks, growth and leftovers to `problems`."""
        created = self.tasks.get("created", 0)
        states = sum(self.tasks.values()) - created
        if states != created:
            self.problems.append(f"{created} tasks were created, {states} are there")
        grown = [role.role for role in self.roles if not role.holds]
        self.problems += [f"{role} grows" for role in grown] + self.left
        if self.first is None or self.last is None:
            return  # the run has ended, which is named already
        for (name, before), after in zip(
            asdict(self.first).items(), asdict(self.last).values(), strict=True
        ):
            if after > before + LEAVES:
                self.problems.append(f"{before} {name} at first, {after} at last")

    def markdown(self) -> str:
        """Write the results for people."""
        states = ", ".join(f"{name} {count}" for name, count in self.tasks.items())
        return "\n".join(
            (
                results_as_markdown(self.rows),
                growth.markdown(self.roles),
                f"{self.minutes:.1f} minutes, {len(self.rows)} faults, {self.batches} batches",
                f"tasks: {states}; granted to the lying actor: {self.granted_to_liar}",
                f"at first {self.first}, at last {self.last}, left: {self.left or 'nothing'}",
                f"problems: {self.problems or 'none'}\n",
            )
        )


class HonestCase(FaultCase):
    """A fault that follows the tasks of honest actors, because a liar stops its own tasks."""

    def _leased(self) -> list[TaskSeen]:
        held = super()._leased()
        return [task for task in held if not task.incarnation.startswith(lying_actor.NAME)]


def endure(plan: Plan, *, minutes: float, seed: int, on_progress: OnProgress) -> EnduranceResult:
    """Hurt one run for so long; write `endurance.md` and `endurance.json` at the end.

    An error of Nyala that ends the run is one of the result's `problems`.

    Raises:
        FileExistsError: `plan.folder` exists.
    """
    plan.folder.mkdir(parents=True)
    entries = {path.name for path in growth.SHARED.iterdir()}
    place = None if clock_jumps.obstacle() else clock_jumps.shiftable
    faults = [
        fault
        for fault in plan.faults
        if fault.place in {None, place} and not fault.overrides and fault.obstacle() is None
    ]
    ground = Fault("endurance", "a run to hurt", lambda _: None, place=place)
    result = EnduranceResult()
    try:
        with live_run(plan, "ring", ground) as run, _liar(run, seed) as granted:
            _hurt(run, faults, result, minutes=minutes, seed=seed, on_progress=on_progress)
            _count(run, result, granted)
    except NyalaError as error:
        result.problems.append(f"the run ended: {error}")
    result.left = _left(plan.folder, entries)
    result.judge()
    (plan.folder / "endurance.md").write_text(result.markdown(), encoding="utf-8")
    figures = asdict(result) | {"rows": results_as_json(result.rows), "holds": result.holds}
    text = json.dumps(figures, indent=1) + "\n"
    (plan.folder / "endurance.json").write_text(text, encoding="utf-8")
    return result


def _hurt(
    run: LiveRun,
    faults: list[Fault],
    result: EnduranceResult,
    *,
    minutes: float,
    seed: int,
    on_progress: OnProgress,
) -> None:
    """Inject faults until the time is over, then wait until the run is complete again."""
    draw, began = random.Random(seed), time.monotonic()
    report_at = 0.0
    seen = ResourceSampler(lambda: roles_of(run))
    seen.start()
    try:
        _wait_until_complete(run)
        result.first = growth.count_resources(run.all_pids)
        while result.minutes < minutes:
            if result.minutes >= report_at:
                run.pids("broker")  # raises if there is no run any more
                report_at = result.minutes + REPORT_MIN
                on_progress(result.minutes, line_of(run))
            result.problems += resume_if_paused(run)
            if draw.random() < QUIET_SHARE:
                _work_undisturbed(run)
            else:
                fault = draw.choice(faults)
                row = FaultResult(fault.name, fault.what)
                result.rows.append(row)
                with _noted(row):
                    measure(fault, HonestCase(run), row, may_die=True)
                on_progress(result.minutes, " | ".join(row.cells()))
            result.minutes = (time.monotonic() - began) / 60
        _wait_until_complete(run)
        result.last = growth.count_resources(run.all_pids)
    finally:
        seen.stop()
        result.roles = seen.by_role()


def resume_if_paused(run: LiveRun) -> list[str]:
    """Resume leasing, as an operator does; return the reason of a pause, if there was one.

    Nothing happens while the store is away.
    """
    try:
        why = run.store.run(operations.closed()).paused
        if why:
            run.store.run(operations.resume())
    except StoreError:  # tried again after the next fault
        return []
    return [f"leasing was paused: {why}"] if why else []


@contextmanager
def _noted(row: FaultResult) -> Iterator[None]:
    """Write the error of a fault into its row; the run goes on, unless it has ended itself."""
    try:
        yield
    except (NyalaError, OSError) as error:
        row.error = f"{type(error).__name__}: {error}"


def _work_undisturbed(run: LiveRun) -> None:
    """Let the run work for a while, with its actors and the liar."""
    until = time.monotonic() + QUIET_S
    while time.monotonic() < until:
        run.fleet.refill()
        run.sleep(1.0)


def _wait_until_complete(run: LiveRun) -> None:
    """Wait until every role is up and the run trains."""
    run.until(
        lambda: all(run.pids(role) for role in ROLES) and run.fleet.all_serve(), "a whole run"
    )
    step = run.step
    run.until(lambda: run.step > step, "training")


def line_of(run: LiveRun) -> str:
    """Write the progress of a run for its log."""
    try:
        stats = run.stats()
    except StoreError as error:
        return f"the store is unreachable: {error}"
    states = ", ".join(f"{name} {count}" for name, count in stats.by_state.items())
    return f"batch {stats.version}: created {stats.created} = {states}"


def roles_of(run: LiveRun) -> dict[int, str]:
    """Return the role of each live process of a run."""
    leader = run.up_pid
    if leader is None:
        return {}
    roles = {leader: "up"} | {actor.pid: "actor" for actor in list(run.fleet.actors)}
    for pid, words in descendants(leader).items():
        roles[pid] = next((role for role in ROLES if plays(role, words)), "other")
    return roles


def _count(run: LiveRun, result: EnduranceResult, file: Path) -> None:
    """Count the tasks by state, and report dead tasks that the liar never had."""
    stats, letters = run.stats(), _dead_letters(run)
    granted = {int(word) for word in file.read_text(encoding="utf-8").split()}  # after the letters
    result.batches = stats.version
    result.tasks = {"created": stats.created, **stats.by_state}
    result.granted_to_liar = len(granted)
    result.problems += run.store.run(operations.audit())
    result.problems += spoilt_by_others(letters, granted)


def spoilt_by_others(letters: Iterable[DeadLetter], granted: set[int]) -> list[str]:
    """Describe the dead letters that the lying actor was never granted."""
    return [
        f"task {letter.task_id} died, which the liar never had: {letter.why}"
        for letter in letters
        if letter.task_id not in granted
    ]


def _dead_letters(run: LiveRun) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    while page := run.store.run(operations.dead_letters(len(letters), PAGE)):
        letters += page
    return letters


def _left(folder: Path, entries: set[str]) -> list[str]:
    """Describe processes and entries of /dev/shm that outlived the run."""
    deadline = time.monotonic() + GONE_S
    while (pids := growth.processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    orphans = growth.orphaned_entries(entries)
    return [f"process {pid} is left" for pid in pids] + [
        f"{growth.SHARED / name} is left" for name in sorted(orphans)
    ]


@contextmanager
def _liar(run: LiveRun, seed: int) -> Iterator[Path]:
    """Run a lying actor; yield the file of the tasks that it was granted."""
    folder = run.folder.path.parent
    granted = folder / "granted_to_liar"
    granted.touch()
    module = lying_actor.__name__
    words = ("--config", str(run.folder.config), "--granted", str(granted), "--seed", str(seed))
    command = Command(
        lying_actor.NAME,
        "actor",
        (sys.executable, "-m", module, *words),
        folder / "liar.log",
        run.actor_environment,
    )
    with closing(ProcessGuard(grace_s=GUARD_S)) as guard:
        process = Process(command, guard)
        process.start()
        try:
            yield granted
            if process.poll() is not None:
                raise ExpectationFailed(
                    f"the lying actor must run on, got its exit; look into {folder}/liar.log"
                )
        finally:
            process.kill()
