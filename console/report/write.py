"""`nyala report`: `report.html`, a template filled with runs, one file that needs nothing else.

`nyala up` writes it too, at the end of a run.

The template engine escapes every text, control characters are written out, and a content security
policy lets nothing of the page run or be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from configs import durable
from configs.errors import SettingsError, printable_lines
from console.display.display import print_line
from console.run.run_folder import RunFolder

from .drawing import MOST, short
from .record import ReportedRun, read_run
from .sections import figure_rows, headline, sections_of, setting_rows, tiles, version_rows

PAGE = Path(__file__).parent / "page"


def write_report(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the report of one run, or of several side by side; an earlier one is replaced.

    Args:
        folders: Folders of the runs.
        path: File to write; None = `report.html` in the folder of the first run.

    Raises:
        SettingsError: A folder holds no run, or its run has trained no batch yet.
    """
    runs = [read_run(folder) for folder in folders]
    target = path or RunFolder(runs[0].folder).report
    # Readable by this user alone, as the samples that it shows.
    durable.replace_file(target, render(runs), mode=0o600)
    return target


def render(runs: Sequence[ReportedRun]) -> str:
    """Return the report as an HTML page."""
    return (
        page_templates(PAGE)
        .get_template("report.html.jinja")
        .render(
            title=" beside ".join(run.name for run in runs),
            heads=[
                {"name": run.name, "headline": headline(run), "advice": _advice(run)}
                for run in runs
            ],
            tiles=tiles(runs[0]) if len(runs) == 1 else [],
            figures=figure_rows(runs),
            sections=sections_of(runs),
            answers=[run for run in runs if run.changes.shown],
            settings=setting_rows(runs),
            versions=version_rows(runs),
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            most=MOST,
        )
    )


def page_templates(folder: Path) -> Environment:
    """Return the templates of a folder, and those of the report, whose style they share."""
    templates = Environment(
        loader=FileSystemLoader([folder, PAGE]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_controls,
    )
    templates.filters["short"] = short
    return templates


def _without_controls(value: object) -> object:
    """Write out what would control a terminal or turn the direction of reading, in every text."""
    return printable_lines(value) if type(value) is str else value


def _advice(run: ReportedRun) -> list[str]:
    """List advice, then the alerts of the guards with their number."""
    newest = run.curves.advice_at
    advice = [f"{text} (batch {newest[rule]:,})" for rule, text in run.curves.advice.items()]
    alerts = [
        f"alert {name} in {count:,} of {len(run.curves.steps):,} batches, last in batch "
        f"{run.curves.alerts_at[name]:,}; the learner's log has the reason"
        for name, count in run.curves.alerts.most_common()
    ]
    return advice + alerts


# --------------------------------------------------------------------------------------------------
# `nyala report`: curves, settings and answers of runs as one HTML file.

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

    The file has curves, settings and answers. It works offline, in a dark or a light window of any
    width, and for a run that still trains. Several runs share their charts. `nyala up` writes one
    when a run ends.

    Example: `nyala report runs/demo`
    """
    if len(runs) > MAX_RUNS:
        raise SettingsError(
            f"a report must be of at most {MAX_RUNS} runs, got {len(runs)}; name fewer of them"
        )
    path = output or (None if len(runs) == 1 else Path("report.html"))
    print_line(Console(), f"{write_report(runs, path)}")
