"""`nyala logs`: what the processes of a run have logged, merged, and followed if asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import SettingsError
from console.arguments import Run
from console.display.display import print_line
from console.run.run_folder import run_folder_of

from .log_lines import Log, LogLine, merged

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
    n: Annotated[int, typer.Option("-n", min=0, max=100_000, help="How many old lines.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new lines.")] = False,
) -> None:
    """Show the logs of a run.

    Of all processes on this machine, or of those whose name begins with ROLE, in the order of time.
    Times are UTC. The files lie in the run's folder under logs/.

    Example: `nyala logs runs/demo learner -f`
    """
    folder = run_folder_of(run).path / "logs"
    console = Console()
    files = _files(folder, role)
    if not files and not follow:
        raise SettingsError(
            f"role must be one that has a log, got {role or 'none'} of: "
            f"{', '.join(path.stem for path in _files(folder, None)) or 'no logs yet'}"
        )
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
