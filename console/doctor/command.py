"""`nyala doctor`: everything that can be wrong with a machine, settings or a run, in one list."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import NyalaError
from configs.worker import Worker
from console.command_line import AsJson, Overrides
from console.display.display import print_line
from console.run.checks.check import Check, CheckWarning
from console.run.run_folder import settings_of
from console.verbs.join_pack import is_pack

from .implied import pack_checks, settings_checks
from .machine import machine_checks

# --------------------------------------------------------------------------------------------------
# Checks under deadlines, one after the other, none of which can end the command.
#
#     the check returns figures              -> ok
#     the check returns a CheckWarning       -> warning
#     the check raises or exceeds its limit  -> failed -> checks that need it are skipped


class CheckStatus(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    group: str
    name: str
    grade: CheckStatus
    text: str
    """Figures, or what is wrong and the next step."""
    seconds: float


def examine(
    checks: Sequence[Check], *, begins: Callable[[Check], None] = lambda _check: None
) -> Iterator[CheckResult]:
    """Run the checks in their order, and yield the result of each as it ends.

    An exception of a check becomes a failed result. So does a check that takes longer than its
    `limit_s`: it goes on in its thread, and the next check begins. A check is skipped if one that
    it needs failed or was skipped.

    Args:
        checks: Each after those that it needs.
        begins: Called before each check that is not skipped.
    """
    lost: set[tuple[str, str]] = set()
    for check in checks:
        if (check.group, check.needs) in lost:
            lost.add((check.group, check.name))
            text = f"{check.needs} has to be put right first"
            yield CheckResult(check.group, check.name, CheckStatus.SKIPPED, text, 0.0)
            continue
        begins(check)
        began = time.monotonic()
        grade, text = _look(check)
        if grade is CheckStatus.FAILED:
            lost.add((check.group, check.name))
        yield CheckResult(check.group, check.name, grade, text, time.monotonic() - began)


def _look(check: Check) -> tuple[CheckStatus, str]:
    """Run one check in a thread, which is left behind where it does not end."""
    outcomes: list[tuple[CheckStatus, str]] = []
    worker = Worker(lambda: outcomes.append(_outcome(check)), name=f"check-{check.name}").start()
    worker.join(check.limit_s)
    if outcomes:
        return outcomes[0]
    return CheckStatus.FAILED, (
        f"{check.name} must be checked within {check.limit_s:g} s, got no result; look at what it "
        f"waits for: a network, a disk, or code of yours"
    )


def _outcome(check: Check) -> tuple[CheckStatus, str]:
    try:
        answer = check.look()
    except NyalaError as error:
        return CheckStatus.FAILED, str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user may raise anything
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        return (
            CheckStatus.FAILED,
            f"{check.name} must be checked without an error, got {reason}; mend what it names",
        )
    return (
        (CheckStatus.WARNING, answer.text)
        if isinstance(answer, CheckWarning)
        else (CheckStatus.OK, answer)
    )


# --------------------------------------------------------------------------------------------------
# `nyala doctor`: everything that can be wrong with a machine, settings or a run, in one list.

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

    A line for each check: ok, warning, failed or skipped, with figures. No run is started, and one
    that is up goes on meanwhile. The exit code is 0 where nothing failed, and 1 otherwise.

    Example: `nyala doctor mine.yaml`
    """
    console = Console(stderr=as_json, highlight=False)
    findings = list(_examined(_checks(run, overrides or []), console, is_silent=as_json))
    counts = Counter(finding.grade for finding in findings)
    if as_json:
        report = {
            "failed": counts[CheckStatus.FAILED],
            "warnings": counts[CheckStatus.WARNING],
            "checks": [asdict(finding) for finding in findings],
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        shown = [grade for grade in CheckStatus if counts[grade] or grade is CheckStatus.FAILED]
        print_line(console, ", ".join(f"{counts[grade]} {grade}" for grade in shown))
    raise typer.Exit(FAILED if counts[CheckStatus.FAILED] else 0)


def _checks(path: Path | None, overrides: list[str]) -> list[Check]:
    """List the checks of the run, settings or pack that a person names."""
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


def _examined(checks: list[Check], console: Console, *, is_silent: bool) -> Iterable[CheckResult]:
    """Run the checks, and print each as it ends; a terminal shows which is under way."""
    group = ""
    with console.status("") as progress:
        for finding in examine(checks, begins=lambda c: progress.update(f"{c.group}: {c.name}")):
            if not is_silent:
                if finding.group != group:
                    group = finding.group
                    print_line(console, group)
                _print(console, finding)
            yield finding


def _print(console: Console, finding: CheckResult) -> None:
    first, *rest = finding.text.split("\n")
    print_line(console, f"  {finding.grade:<8} {finding.name:<14} {first}")
    for line in rest:
        print_line(console, f"  {'':<8} {'':<14} {line}")
