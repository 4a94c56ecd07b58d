"""`nyala sweep`: runs of one settings file with several values, one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import SettingsError
from configs.settings import Settings
from console.arguments import Overrides
from console.display.display import print_line
from console.live.stop import stop_limit_s
from console.run.own_files import resolve
from console.run.run_folder import RunFolder, RunState, changes_of_result, settings_of
from console.typed import as_typed
from console.verbs.tables import Facts, print_facts

from .grid import Axis, Point, grid, parse_axis
from .outcome import outcome_of, ranked
from .page import write_sweep
from .schedule import Planned, run_all

FAILED, STOPPED = 1, 130

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A settings file.")],
    over: Annotated[
        list[str],
        typer.Option(
            metavar="TABLE.KEY=VALUE,VALUE,...",
            help="A setting and its values; several make every combination.",
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
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
) -> None:
    """Make a run for each combination of values, one after the other.

    The runs lie in one folder, with a table and curves in sweep.html at the end. The same command
    again leaves out what has finished, goes on with what has not, and may have further values.

    Example: `nyala sweep mine.yaml --over learner.lr=1e-6,3e-6 --over run.seed=1,2`
    """
    axes = [parse_axis(text) for text in over]
    made = Sweep.plan(config, axes, overrides or [], name=name)
    raise typer.Exit(made.carry_out(Console(), jobs=jobs))


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of one sweep."""

    config: Path
    folder: Path
    axes: Sequence[Axis]
    runs: Sequence[tuple[Point, Settings, Sequence[str]]]
    """Of each its values, all its settings, and the overrides that make them."""

    @classmethod
    def plan(
        cls, config: Path, axes: Sequence[Axis], overrides: Sequence[str], *, name: str | None
    ) -> Sweep:
        """Read and check the settings of all runs; nothing is started or written.

        Raises:
            SettingsError: Those of one are wrong, or not those that it was begun with.
        """
        base = settings_of(config, overrides).run
        folder = base.directory.expanduser().resolve() / (name or f"{base.name}-sweep")
        runs: list[tuple[Point, Settings, Sequence[str]]] = []
        for point in grid(axes, base=base.name):
            own = [f"run.name={json.dumps(point.name)}", f"run.directory={json.dumps(str(folder))}"]
            changes = [*overrides, *point.overrides, *own]
            settings = resolve(settings_of(config, changes))
            files = RunFolder(settings.run.folder)
            if files.state is not RunState.NEW:
                _refuse_changes(files, settings)
            runs.append((point, settings, changes))
        return cls(config, folder, axes, runs)

    def carry_out(self, console: Console, *, jobs: int) -> int:
        """Make the runs that have not finished; return the exit code."""
        planned = [self._planned(*run) for run in self.runs if not _is_finished(run[1])]
        print_line(
            console,
            f"{len(self.runs)} runs in {self.folder}, {len(self.runs) - len(planned)} of them "
            "finished already",
        )
        number = len(self.runs) - len(planned)
        failures: list[str] = []

        def on_start(run: Planned) -> None:
            nonlocal number
            number += 1
            place = self.folder / run.name
            print_line(console, f"run {number} of {len(self.runs)}: nyala top {place}")

        def on_end(run: Planned, failure: str | None) -> None:
            if failure is not None:
                failures.append(run.name)
                print_line(console, f"{run.name} has failed; {failure}")

        try:
            run_all(planned, jobs=jobs, on_start=on_start, on_end=on_end)
        except KeyboardInterrupt:
            print_line(console, "stopped; the same command goes on")
            self._show(console)
            return STOPPED
        self._show(console)
        return FAILED if failures else 0

    def _planned(self, point: Point, settings: Settings, changes: Sequence[str]) -> Planned:
        flags = [text for change in changes for text in ("--set", change)]
        return Planned(
            name=point.name,
            arguments=[str(self.config), *flags],
            log=self.folder / f".{point.name}.up.log",
            stop_s=stop_limit_s(settings),
        )

    def _show(self, console: Console) -> None:
        """Print the table, and write the page."""
        outcomes = [outcome_of(point, settings.run.folder) for point, settings, _ in self.runs]
        rows = [each.row() for each in ranked(outcomes)]
        print_facts(Facts("The best first:", rows), as_json=False, console=console)
        page = write_sweep(self.folder / "sweep.html", self.folder.name, self.axes, outcomes)
        print_line(console, as_typed(f"{page}  table and curves, for a browser"))


def _refuse_changes(folder: RunFolder, settings: Settings) -> None:
    changes = changes_of_result(folder, settings)
    if changes:
        raise SettingsError(
            f"the runs of a sweep must keep the settings they were begun with, got {len(changes)} "
            f"different in {folder.path}; restore them, or begin another sweep with --name:"
            + "".join(changes)
        )


def _is_finished(settings: Settings) -> bool:
    return RunFolder(settings.run.folder).state is RunState.FINISHED
