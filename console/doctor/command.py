"""`nyala doctor`: everything that can be wrong with a machine, settings or a run, in one list."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import NyalaError
from console.arguments import AsJson, Overrides
from console.display.display import print_line
from console.join_pack.pack import is_pack
from console.run.checks.check import Check
from console.run.run_folder import settings_of

from .examination import Finding, Grade, examine
from .implied import settings_checks
from .machine import machine_checks
from .packed import pack_checks

FAILED = 1

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|CONFIG|PACK",
            help="The folder of a run, a settings file, or a file of `nyala join-pack`; without "
            "one the machine alone.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check machine, settings or a run, with a remedy for each fault.

    A line for each check: ok, warning or failed, with figures. Nothing is started, and a run goes
    on meanwhile. The exit code is 0 where nothing failed, and 1 otherwise.

    Example: `nyala doctor mine.yaml`
    """
    console = Console(stderr=as_json, highlight=False)
    findings = list(_examined(_checks(run, overrides or []), console, is_silent=as_json))
    counts = Counter(finding.grade for finding in findings)
    if as_json:
        found = {
            "failed": counts[Grade.FAILED],
            "warnings": counts[Grade.WARNING],
            "checks": [asdict(finding) for finding in findings],
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        shown = [grade for grade in Grade if counts[grade] or grade is Grade.FAILED]
        print_line(console, ", ".join(f"{counts[grade]} {grade}" for grade in shown))
    raise typer.Exit(FAILED if counts[Grade.FAILED] else 0)


def _checks(path: Path | None, overrides: list[str]) -> list[Check]:
    """List the checks of what a person names."""
    if path is None:
        return machine_checks(Path("runs"), has_settings=False)
    if is_pack(path):
        return [*machine_checks(Path("runs"), has_settings=True), *pack_checks(path, overrides)]
    try:
        settings = settings_of(path, overrides)
    except NyalaError as error:
        refusal = error

        def refuse() -> str:
            raise refusal

        unread = Check("settings", "read", refuse)
        return [*machine_checks(Path("runs"), has_settings=False), unread]
    return [
        *machine_checks(settings.run.directory, has_settings=True),
        *settings_checks(settings, path),
    ]


def _examined(checks: list[Check], console: Console, *, is_silent: bool) -> Iterable[Finding]:
    """Do the checks, and print each as it ends; a terminal shows which is under way."""
    group = ""
    with console.status("") as progress:
        for finding in examine(checks, begins=lambda c: progress.update(f"{c.group}: {c.name}")):
            if not is_silent:
                if finding.group != group:
                    group = finding.group
                    print_line(console, group)
                _print(console, finding)
            yield finding


def _print(console: Console, finding: Finding) -> None:
    first, *rest = finding.text.split("\n")
    print_line(console, f"  {finding.grade:<8} {finding.name:<14} {first}")
    for line in rest:
        print_line(console, f"  {'':<8} {'':<14} {line}")
