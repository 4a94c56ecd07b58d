"""`nyala sweep`: the runs of a sweep prepared, made, and summed up in a table and a page."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console

from configs.errors import NyalaError, SettingsError
from configs.settings import Settings
from console.api import UpProcess
from console.command_line import Overrides
from console.display.display import print_line
from console.live.stop import stop_limit_s
from console.run.run_folder import RunFolder, RunState, changes_of_result, settings_of
from console.run.user_files import resolve
from console.verbs.compare import judge_of
from console.verbs.tables import ResultTable, print_facts

from .grid import Axis, SweepPoint, grid, outcome_of, parse_axis, ranked
from .page import write_sweep
from .study import Study, range_of

# --------------------------------------------------------------------------------------------------
# The runs of a sweep, started in turn and watched: `--jobs` of them at a time.
#
#     waiting -> running -> finished
#             -> running -> failed: the others go on, and the next sweep tries it again

LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Planned:
    """A run that is to be started."""

    point: SweepPoint
    arguments: Sequence[str]
    """Arguments of `nyala up`."""
    log: Path
    stop_s: float
    """Longest time of an orderly end, seconds."""


def run_all(
    planned: Iterator[Planned],
    *,
    jobs: int,
    on_end: Callable[[Planned, str | None], None],
) -> None:
    """Run everything that is planned, `jobs` at a time.

    An interrupt or another error asks all runs to stop, waits until they have, and goes on.

    Args:
        planned: Runs in the order in which they start; each is asked for when its turn comes.
        jobs: Most runs at a time.
        on_end: Called when a run ends, with the reason if it failed.

    Raises:
        NyalaError: A run has not stopped within its `stop_s`.
    """
    running: dict[UpProcess, Planned] = {}
    try:
        while True:
            while len(running) < jobs and (run := next(planned, None)) is not None:
                process = UpProcess(run.arguments, log=run.log, stop_s=run.stop_s, detached=False)
                running[process] = run
            if not running:
                return
            for process in [process for process in running if not process.is_alive]:
                on_end(running.pop(process), _failure(process))
            time.sleep(LOOK_EVERY_S)
    finally:
        for process in running:
            process.ask_to_stop()
        for process in running:
            process.stop()


def _failure(process: UpProcess) -> str | None:
    try:
        process.check_exit_code()
    except NyalaError as error:
        return str(error)
    return None


# --------------------------------------------------------------------------------------------------
# One sweep: its runs prepared, made, and summed up in a table and a page.

FAILED, STOPPED = 1, 130


class PointSource(Protocol):
    """The source of a sweep's points."""

    def __len__(self) -> int:
        """Return the number of runs in all."""
        ...

    def points(self) -> Iterator[SweepPoint]:
        """Yield the points of the runs in order; some runs may have finished already."""
        ...

    def made(self) -> list[SweepPoint]:
        """List the points that the table shows."""
        ...

    def tell(self, name: str, score: float | None) -> None:
        """Learn the score of a run; None = it failed, or has none."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """All points, known from the beginning."""

    all_points: Sequence[SweepPoint]

    def __len__(self) -> int:
        return len(self.all_points)

    def points(self) -> Iterator[SweepPoint]:
        return iter(self.all_points)

    def made(self) -> list[SweepPoint]:
        return list(self.all_points)

    def tell(self, name: str, score: float | None) -> None:
        """Do nothing: the points do not depend on scores."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of one settings file, in one folder."""

    config: Path
    overrides: Sequence[str]
    axes: Sequence[Axis]
    folder: Path

    def prepare(self, point: SweepPoint) -> tuple[Settings, list[str]]:
        """Return all settings of a run, and the overrides that make them.

        Raises:
            SettingsError: The settings are wrong, or differ from those that the run began with.
        """
        of_run = [
            f"run.name={json.dumps(point.name)}",
            f"run.directory={json.dumps(str(self.folder))}",
        ]
        changes = [*self.overrides, *point.overrides, *of_run]
        settings = resolve(settings_of(self.config, changes))
        files = RunFolder(settings.run.folder)
        if files.state is not RunState.NEW and (changed := changes_of_result(files, settings)):
            raise SettingsError(
                "the runs of a sweep must keep the settings they were begun with, got "
                f"{len(changed)} changed for {files.path}; restore them, or begin another sweep "
                f"with --name:{''.join(changed)}"
            )
        return settings, changes

    def carry_out(self, source: PointSource, console: Console, *, jobs: int) -> int:
        """Start the runs that have not finished, print their table, and write `sweep.html`.

        Returns:
            The exit code: 0, 1 if a run failed, 130 after an interrupt.

        Raises:
            SettingsError: As `prepare`.
        """
        print_line(console, f"{len(source)} runs in {self.folder}")
        number = 0
        failures: list[str] = []

        def planned() -> Iterator[Planned]:
            nonlocal number
            for point in source.points():
                number += 1
                settings, changes = self.prepare(point)
                place = f"run {number} of {len(source)}: "
                if RunFolder(settings.run.folder).state is RunState.FINISHED:
                    print_line(console, f"{place}{point.name} has finished already")
                    source.tell(point.name, self._score(point))
                    continue
                print_line(console, f"{place}nyala top {settings.run.folder}")
                yield self._planned(point, settings, changes)

        def on_end(run: Planned, failure: str | None) -> None:
            source.tell(run.point.name, None if failure else self._score(run.point))
            if failure is not None:
                failures.append(run.point.name)
                print_line(console, f"{run.point.name} has failed; {failure}")

        try:
            run_all(planned(), jobs=jobs, on_end=on_end)
        except KeyboardInterrupt:
            print_line(console, "stopped; run the same command again to continue")
            self._show(source, console)
            return STOPPED
        self._show(source, console)
        return FAILED if failures else 0

    def _planned(self, point: SweepPoint, settings: Settings, changes: Sequence[str]) -> Planned:
        flags = [text for change in changes for text in ("--set", change)]
        return Planned(
            point=point,
            arguments=[str(self.config), *flags],
            log=self.folder / f".{point.name}.up.log",
            stop_s=stop_limit_s(settings),
        )

    def _unlike(self, points: Sequence[SweepPoint]) -> str | None:
        """Describe how the runs are judged differently; None where they are judged alike."""
        judges: dict[str, set[str]] = {}
        all_settings = [self.prepare(point)[0] for point in points]
        for settings in all_settings:
            for name in settings.run.by_environment:
                judges.setdefault(name, set()).add(judge_of(settings, name))
        questions = {tuple(settings.run.by_environment) for settings in all_settings}
        if len(questions) <= 1 and all(len(names) == 1 for names in judges.values()):
            return None
        judgements = ", ".join(
            f"{judge} on {n}" for n, names in judges.items() for judge in sorted(names)
        )
        return (
            f"the runs of a sweep should be judged alike to be ranked, got {judgements}; set "
            f"run.eval_metric to a part of the reward that all have, such as exact"
        )

    def _score(self, point: SweepPoint) -> float | None:
        score = outcome_of(point, self.folder / point.name).figure
        return score if math.isfinite(score) else None

    def _show(self, source: PointSource, console: Console) -> None:
        """Print the table of runs, and write the page."""
        outcomes = [outcome_of(point, self.folder / point.name) for point in source.made()]
        rows = [outcome.short_row() for outcome in ranked(outcomes)]
        print_facts(ResultTable("The best first:", rows), as_json=False, console=console)
        if doubt := self._unlike(source.made()):
            print_line(console, f"warning: {doubt}")
        page = write_sweep(self.folder / "sweep.html", self.folder.name, self.axes, outcomes)
        print_line(console, f"{page}  table and curves, for a browser")


# --------------------------------------------------------------------------------------------------
# `nyala sweep`: runs of one settings file with several values.

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A settings file.")],
    *,
    over: Annotated[
        list[str],
        typer.Option(
            metavar="TABLE.KEY=VALUE,VALUE,...",
            help="A setting and its values; several make every combination. With --trials also a "
            "range, as in learner.lr=1e-7..1e-4.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Folder of the sweep. Default: the run's name with -sweep.", show_default=False
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Search with optuna: so many runs in all, each with values that the scores so "
            "far make promising.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
) -> None:
    """Make a run for each combination of values, or search.

    One after the other, unless --jobs says more. The runs lie in one folder, with a table and
    curves in sweep.html at the end. The same command again leaves out what has finished, goes on
    with what has not, and may have further values.

    Example: `nyala sweep mine.yaml --over learner.lr=1e-6,3e-6 --over run.seed=1,2`
    """
    axes = [parse_axis(text) for text in over]
    base = settings_of(config, overrides or []).run
    folder = base.directory.expanduser().resolve() / (name or f"{base.name}-sweep")
    planned_sweep = Sweep(config, overrides or [], axes, folder)
    # Before anything is started or written: all points of a grid, the ends of all ranges.
    points = grid(_ends(axes, may_be_ranges=trials is not None), base=base.name)
    for point in points:
        planned_sweep.prepare(point)
    source = (
        Grid(points)
        if trials is None
        else Study(folder, axes, base=base.name, trials=trials, jobs=jobs)
    )
    raise typer.Exit(planned_sweep.carry_out(source, Console(), jobs=jobs))


def _ends(axes: Sequence[Axis], *, may_be_ranges: bool) -> list[Axis]:
    """Replace ranges by lists of their two ends.

    Raises:
        SettingsError: There is a range in a grid.
    """
    ends: list[Axis] = []
    for axis in axes:
        if range_of(axis) is None:
            ends.append(axis)
        elif may_be_ranges:
            low, _, high = axis.values[0].partition("..")
            ends.append(Axis(axis.path, (low, high)))
        else:
            raise SettingsError(
                f"a range of {axis.path} must come with --trials, got {axis.values[0]} without; "
                "add --trials 20, or list the values"
            )
    return ends
