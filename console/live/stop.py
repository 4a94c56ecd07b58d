"""`nyala stop`: a run on this machine ended as Ctrl-C ends it, from another terminal.

The Python API ends its runs with `stop_run` too.
"""

from __future__ import annotations

import os
import signal
import time

import typer
from rich.console import Console

from configs.errors import NyalaError
from configs.loader import load
from configs.settings import Settings
from console.command_line import Run
from console.display.display import print_line
from console.display.progress import stopped_line
from console.run.run_folder import RunFolder, run_folder_of
from learner.stopping import read_left_batch

PAUSE_S = 0.1
STOPS = 4  # actors and learner, broker, Redis, what is left: each within console.stop_timeout_s

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def stop(run: Run) -> None:
    """Stop a run on this machine.

    As Ctrl-C does in the terminal of `nyala up`: actors drain and the learner writes a
    checkpoint, then broker and Redis end. Returns when all of it has ended; `nyala up RUN` goes on
    with it.

    Example: `nyala stop runs/demo`
    """
    folder, console = run_folder_of(run), Console()
    if folder.holder is None:
        print_line(console, f"no `nyala up` of {folder.path} works on this machine")
        if folder.is_stopped:
            print_line(console, stopped_line(folder, steps=load(folder.config).run.steps))
        return
    print_line(console, f"stopping process {folder.holder}: actors drain and the learner saves")
    stop_run(folder)
    print_line(console, kept_of(folder))
    print_line(console, f"stopped; to go on: nyala up {folder.path}")


def kept_of(folder: RunFolder) -> str:
    """Describe the checkpoint of a stopped run, and the batches that its next start trains."""
    kept = folder.newest_checkpoint() or "no checkpoint, so the run begins again at batch 1"
    return f"kept: {kept}{_replayed(folder)}"


def _replayed(folder: RunFolder) -> str:
    left, newest = read_left_batch(folder.path), folder.newest_checkpoint()
    if left is None:
        return ""
    first = 1 if newest is None else int(newest.removeprefix("step-")) + 1
    if left <= first:
        return f"; batch {left}, which was under way, is trained again"
    return (
        f"; batches {first} to {left} are trained again: their state could not be written in time"
    )


def stop_limit_s(settings: Settings) -> float:
    """Return the longest time that an orderly end of a run may take, seconds."""
    return STOPS * settings.console.stop_timeout_s


def stop_run(folder: RunFolder) -> None:
    """Send SIGTERM to the `nyala up` of a run, if there is one, and wait until it has ended.

    Raises:
        NyalaError: The process belongs to another user, or has not ended within `stop_limit_s`. It
            is not killed then.
    """
    holder = folder.holder
    if holder is None:
        return
    limit_s = stop_limit_s(load(folder.config))
    try:
        os.kill(holder, signal.SIGTERM)
    except PermissionError:
        raise NyalaError(
            f"process {holder} of {folder.path} must be yours to be stopped, got another user's; "
            f"ask who started it"
        ) from None
    except ProcessLookupError:
        pass  # it has just ended
    deadline = time.monotonic() + limit_s
    while folder.holder == holder:
        if time.monotonic() > deadline:
            raise NyalaError(
                f"{folder.path} must end within {limit_s:g} s, got process {holder} still at work; "
                f"look at `nyala logs {folder.path}`, and wait longer or kill the process"
            )
        time.sleep(PAUSE_S)
