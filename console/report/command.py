"""`nyala report`: curves, settings and answers of runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import SettingsError
from console.display.display import print_line

from .write import write_report

MAX_RUNS = 8  # as many colours as can be told apart

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/demo.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where to write it. Default: report.html in the run's folder; in this one for "
            "several runs.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a run, or several, as one HTML file.

    Curves, settings and answers. It works offline, in a dark or a light window of any width, and on
    a run that still trains. Of several runs the curves share their charts. `nyala up` writes one
    when a run ends.

    Example: `nyala report runs/demo`
    """
    if len(runs) > MAX_RUNS:
        raise SettingsError(
            f"a report must be of at most {MAX_RUNS} runs, got {len(runs)}; name fewer of them"
        )
    path = output or (None if len(runs) == 1 else Path("report.html"))
    print_line(Console(), f"{write_report(runs, path)}")
