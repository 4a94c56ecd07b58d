"""`nyala top`: the live view of a run that was started elsewhere."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from console.arguments import Run
from console.display.display import make_display, print_line
from console.display.result import print_result
from console.run.run_folder import run_folder_of

from .local_run import LocalRun

LOOK_EVERY_S = 1.0  # as often as the view is drawn

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def top(
    run: Run,
    *,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live view.")
    ] = False,
) -> None:
    """Watch a run.

    As the terminal of its `nyala up` shows it, until it has finished; Ctrl-C ends the watching,
    never the run.

    Example: `nyala top runs/demo`
    """
    folder, console = run_folder_of(run), Console()
    source = LocalRun(folder)
    try:
        with make_display(console, name=source.name, plain=plain) as display:
            display.show(source.look())
            while not source.is_over:
                time.sleep(LOOK_EVERY_S)
                display.show(source.look())
    except KeyboardInterrupt:
        return
    finally:
        source.close()
    print_line(console, f"{source.name} has finished")
    print_result(console, folder)
