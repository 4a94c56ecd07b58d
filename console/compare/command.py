"""`nyala compare`: whether one run answers held-out questions better than another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from console.arguments import AsJson
from console.display.display import print_line
from console.verbs.tables import Facts, print_facts

from .comparison import Comparison, Difference, compare

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("compare")
def compare_runs(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Of another run.")],
    step: Annotated[
        int | None,
        typer.Option(
            help="Compare the evaluations after so many batches. Default: the last of each run.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs on the held-out questions that both were asked.

    The 95 % interval is that of a paired bootstrap over questions. Another seed of training may
    make a larger difference: compare several runs of each before you trust a small one.

    Example: `nyala compare runs/before runs/after`
    """
    found = compare(first, second, step=step)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
        return
    console = Console()
    for sentence in found.sentences():
        print_line(console, f"{sentence}.")
    if found.by_environment:
        rows = [_row(found, each) for each in found.by_environment]
        print_facts(Facts("By environment:", rows), as_json=False, console=console)


def _row(found: Comparison, difference: Difference) -> dict[str, Any]:
    a, b = found.names
    low, high = 100 * difference.interval.low, 100 * difference.interval.high
    return {
        "environment": difference.environment,
        "questions": difference.questions,
        a: f"{difference.first:.3f}",
        b: f"{difference.second:.3f}",
        "points": f"{100 * difference.interval.mean:+.1f}",
        "95 % interval": f"{low:+.1f} to {high:+.1f}",
        "better": difference.better,
        "worse": difference.worse,
        "alike": difference.same,
    }
