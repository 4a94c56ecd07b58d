"""`report.html`: the template filled with runs, one file that needs nothing else.

The template engine escapes every text, control characters are written out, and a content security
policy lets nothing of the page run or be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from configs import durable
from configs.printable import printable_lines
from console.report.charts.drawing import short
from console.report.charts.thinning import MOST
from console.report.record.runs import Run, read_run
from console.run.run_folder import RunFolder

from .comparisons import figure_rows, setting_rows, version_rows
from .headline import headline, tiles
from .sections import sections_of

PAGE = Path(__file__).parent / "page"


def write_report(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the report of one run, or of several side by side; an earlier one is replaced.

    Args:
        folders: Of the runs.
        path: The file; None = `report.html` in the folder of the first run.

    Raises:
        SettingsError: One of them is no run, or has trained no batch yet.
    """
    runs = [read_run(folder) for folder in folders]
    target = path or RunFolder(runs[0].folder).report
    # Readable by this user alone, as the samples that it shows.
    durable.replace_file(target, render(runs), mode=0o600)
    return target


def render(runs: Sequence[Run]) -> str:
    """Return the page."""
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
    """Return the templates of a folder, beside those of a report, whose style they share."""
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


def _advice(run: Run) -> list[str]:
    """List advice, then the alerts of the guards with their number."""
    newest = run.curves.advice_at
    advice = [f"{text} (batch {newest[rule]:,})" for rule, text in run.curves.advice.items()]
    alerts = [
        f"alert {name} in {count:,} of {len(run.curves.steps):,} batches, last in batch "
        f"{run.curves.alerts_at[name]:,}; the learner's log has the reason"
        for name, count in run.curves.alerts.most_common()
    ]
    return advice + alerts
