"""`nyala logs`: what the processes of a run have logged, merged, and followed if asked for."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import SettingsError, printable
from configs.json_lines import LineFollower
from console.command_line import Run
from console.display.display import print_line
from console.run.run_folder import run_folder_of

# --------------------------------------------------------------------------------------------------
# Lines of the logs of a run's processes, merged by time.
#
# A process writes JSON lines; what others write (Redis, a traceback) is text and belongs to the
# moment of the line before it.

FIRST_READ_BYTES = 2**20  # of each log: the newest few thousand lines
SHOWN_APART = ("timestamp", "level", "event", "role", "run", "version", "incarnation", "exception")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a process's log."""

    timestamp: str
    """ISO 8601, UTC; empty before the first of a log."""
    process: str
    text: str
    """The line without its timestamp and process, as it is printed."""


class Log:
    """The log of one process, read from its newest part on while it is written."""

    def __init__(self, path: Path) -> None:
        self._process = path.stem
        self._lines = LineFollower(path, newest_bytes=FIRST_READ_BYTES)
        self._timestamp = ""

    def read_new(self) -> list[LogLine]:
        """Return the whole lines since the last call; the first time, those of the newest 1 MiB."""
        lines = self._lines.read()
        return [self._read(line.removesuffix(b"\n").decode(errors="replace")) for line in lines]

    def _read(self, line: str) -> LogLine:
        try:
            row = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or "event" not in row:
            return LogLine(self._timestamp, self._process, printable(line))
        self._timestamp = str(row.get("timestamp", self._timestamp))
        level = str(row.get("level", "info"))
        words = ["" if level == "info" else level.upper(), str(row["event"])]
        words += [f"{key}={value}" for key, value in row.items() if key not in SHOWN_APART]
        text = printable(" ".join(filter(None, words)))
        trace = str(row.get("exception", "")).splitlines()
        return LogLine(self._timestamp, self._process, "\n".join([text, *map(printable, trace)]))


def merged(logs: list[Log]) -> list[LogLine]:
    """Read what is new in all logs, in the order of time."""
    return sorted((line for log in logs for line in log.read_new()), key=_time)


def _time(line: LogLine) -> str:
    return line.timestamp


# --------------------------------------------------------------------------------------------------
# `nyala logs`: what the processes of a run have logged, merged, and followed if asked for.

PAUSE_S = 0.3  # between two looks

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Role = Annotated[
    str | None,
    typer.Argument(metavar="ROLE", help="learner, broker, redis, actor, or one such as actor-0."),
]


@app.command()
def logs(
    run: Run,
    role: Role = None,
    *,
    n: Annotated[int, typer.Option("-n", min=0, max=100_000, help="Number of old lines.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new lines.")] = False,
) -> None:
    """Show the logs of a run.

    Lines come from all processes on this machine, or from those whose names begin with ROLE, in the
    order of time. Times are UTC. The files are in the run's folder under logs/.

    Example: `nyala logs runs/demo learner -f`
    """
    folder = run_folder_of(run).path / "logs"
    console = Console()
    files = _files(folder, role)
    if not files and not follow:
        there = ", ".join(path.stem for path in _files(folder, None))
        if not there:
            raise SettingsError(f"{folder} must hold logs, got none; wait until the run has begun")
        raise SettingsError(f"ROLE must be one that has a log, got {role}; choose among {there}")
    opened = {path: Log(path) for path in files}
    lines = merged(list(opened.values()))
    for line in lines[len(lines) - min(n, len(lines)) :]:
        _print(console, line)
    while follow:
        time.sleep(PAUSE_S)
        for path in _files(folder, role):
            opened.setdefault(path, Log(path))  # of an actor that has come
        for line in merged(list(opened.values())):
            _print(console, line)


def _files(folder: Path, role: str | None) -> list[Path]:
    return sorted(path for path in folder.glob("*.log") if path.stem.startswith(role or ""))


def _print(console: Console, line: LogLine) -> None:
    clock = line.timestamp[11:19] or "-" * 8
    print_line(console, f"{clock} {line.process}: {line.text}")
