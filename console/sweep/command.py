"""`nyala sweep`: runs of one settings file with several values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import SettingsError
from console.arguments import Overrides
from console.run.run_folder import settings_of

from .grid import Axis, grid, parse_axis
from .study import Study, range_of
from .sweep import Grid, Sweep

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
    made = Sweep(config, overrides or [], axes, folder)
    # Before anything is started or written: all points of a grid, the ends of all ranges.
    points = grid(_ends(axes, may_be_ranges=trials is not None), base=base.name)
    for point in points:
        made.prepare(point)
    source = (
        Grid(points)
        if trials is None
        else Study(folder, axes, base=base.name, trials=trials, jobs=jobs)
    )
    raise typer.Exit(made.carry_out(source, Console(), jobs=jobs))


def _ends(axes: Sequence[Axis], *, may_be_ranges: bool) -> list[Axis]:
    """Replace ranges by lists of their two ends.

    Raises:
        SettingsError: There is a range in a grid.
    """
    found: list[Axis] = []
    for axis in axes:
        if range_of(axis) is None:
            found.append(axis)
        elif may_be_ranges:
            low, _, high = axis.values[0].partition("..")
            found.append(Axis(axis.path, (low, high)))
        else:
            raise SettingsError(
                f"a range of {axis.path} must come with --trials, got {axis.values[0]} without; "
                "add --trials 20, or list the values"
            )
    return found
