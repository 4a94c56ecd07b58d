"""One sweep: its runs prepared, made, and summed up in a table and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from configs.errors import SettingsError
from configs.settings import Settings
from console.display.display import print_line
from console.live.stop import stop_limit_s
from console.run.own_files import resolve
from console.run.run_folder import RunFolder, RunState, changes_of_result, settings_of
from console.verbs.tables import Facts, print_facts

from .grid import Axis, Point
from .outcome import outcome_of, ranked
from .page import write_sweep
from .schedule import Planned, run_all

FAILED, STOPPED = 1, 130


class Source(Protocol):
    """Where the points of a sweep come from."""

    def __len__(self) -> int:
        """Count the runs in all."""
        ...

    def points(self) -> Iterator[Point]:
        """Yield what is to be made."""
        ...

    def made(self) -> list[Point]:
        """List what the table is to have."""
        ...

    def tell(self, name: str, score: float | None) -> None:
        """Take the score of a run; None = it failed, or has none."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """All points, known from the beginning."""

    all_points: Sequence[Point]

    def __len__(self) -> int:
        return len(self.all_points)

    def points(self) -> Iterator[Point]:
        return iter(self.all_points)

    def made(self) -> list[Point]:
        return list(self.all_points)

    def tell(self, name: str, score: float | None) -> None:
        """Learn nothing: the points are what they are."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs of one settings file in one folder."""

    config: Path
    overrides: Sequence[str]
    axes: Sequence[Axis]
    folder: Path

    def prepare(self, point: Point) -> tuple[Settings, list[str]]:
        """Return all settings of a run, and the overrides that make them.

        Raises:
            SettingsError: They are wrong, or not those that it was begun with.
        """
        own = [
            f"run.name={json.dumps(point.name)}",
            f"run.directory={json.dumps(str(self.folder))}",
        ]
        changes = [*self.overrides, *point.overrides, *own]
        settings = resolve(settings_of(self.config, changes))
        files = RunFolder(settings.run.folder)
        if files.state is not RunState.NEW and (found := changes_of_result(files, settings)):
            raise SettingsError(
                "the runs of a sweep must keep the settings they were begun with, got "
                f"{len(found)} different in {files.path}; restore them, or begin another sweep "
                f"with --name:{''.join(found)}"
            )
        return settings, changes

    def carry_out(self, source: Source, console: Console, *, jobs: int) -> int:
        """Make the runs that have not finished; return the exit code."""
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
            print_line(console, "stopped; the same command goes on")
            self._show(source, console)
            return STOPPED
        self._show(source, console)
        return FAILED if failures else 0

    def _planned(self, point: Point, settings: Settings, changes: Sequence[str]) -> Planned:
        flags = [text for change in changes for text in ("--set", change)]
        return Planned(
            point=point,
            arguments=[str(self.config), *flags],
            log=self.folder / f".{point.name}.up.log",
            stop_s=stop_limit_s(settings),
        )

    def _score(self, point: Point) -> float | None:
        score = outcome_of(point, self.folder / point.name).figure
        return score if math.isfinite(score) else None

    def _show(self, source: Source, console: Console) -> None:
        """Print the table, and write the page."""
        outcomes = [outcome_of(point, self.folder / point.name) for point in source.made()]
        rows = [each.short_row() for each in ranked(outcomes)]
        print_facts(Facts("The best first:", rows), as_json=False, console=console)
        page = write_sweep(self.folder / "sweep.html", self.folder.name, self.axes, outcomes)
        print_line(console, f"{page}  table and curves, for a browser")
