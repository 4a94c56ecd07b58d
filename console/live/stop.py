"""`nyala stop`: a run on this machine ended as Ctrl-C ends it, from another terminal."""

from __future__ import annotations

import os
import signal
import time

import typer
from rich.console import Console

from configs.errors import NyalaError
from configs.loader import load
from console.arguments import Run
from console.display.display import print_line
from console.run.run_folder import run_folder_of

PAUSE_S = 0.1
STOPS = 4  # of processes one after the other, each within console.stop_timeout_s

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def stop(run: Run) -> None:
    """Stop a run on this machine.

    As Ctrl-C does in the terminal of `nyala up`: actors drain, the learner writes a checkpoint,
    broker and Redis end. Returns when all of it has ended; `nyala up RUN` goes on with it.

    Example: `nyala stop runs/demo`
    """
    folder, console = run_folder_of(run), Console()
    holder = folder.holder
    if holder is None:
        print_line(console, f"no `nyala up` of {folder.path} works on this machine")
        return
    limit_s = STOPS * load(folder.config).console.stop_timeout_s
    try:
        os.kill(holder, signal.SIGTERM)
    except PermissionError:
        raise NyalaError(
            f"process {holder} of {folder.path} must be yours to be stopped, got another user's; "
            f"ask who started it"
        ) from None
    except ProcessLookupError:
        pass  # it has just ended
    print_line(console, f"stopping process {holder}: actors drain, the learner saves")
    deadline = time.monotonic() + limit_s
    while folder.holder == holder:
        if time.monotonic() > deadline:
            raise NyalaError(
                f"{folder.path} must end within {limit_s:g} s, got process {holder} still at work; "
                f"look at `nyala logs {folder.path}`"
            )
        time.sleep(PAUSE_S)
    print_line(console, f"stopped; to go on: nyala up {folder.path}")
