"""`nyala top`: the live view of a run that was started elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rich.console import Console

from configs.errors import SettingsError
from console.display.display import make_display, print_line
from console.display.result import print_result
from console.run.run_folder import RunFolder, run_folder_of

from .local_run import LocalRun
from .remote_run import Address, RemoteRun

LOOK_EVERY_S = 1.0  # as often as the view is drawn

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def top(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The folder of a run, or tcp://HOST:PORT/NAME of its broker."
        ),
    ],
    *,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With an address: an observer's key, broker.pub beside it.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live view.")
    ] = False,
) -> None:
    """Watch a run.

    As the terminal of its `nyala up` shows it, until it has finished; Ctrl-C ends the watching,
    never the run. A run on other machines is seen through its broker, with an observer's key.

    Example: `nyala top runs/demo`
    """
    console = Console()
    source, folder = _source(run, key)
    try:
        with _without_logs(), make_display(console, name=source.name, plain=plain) as display:
            display.show(source.look())
            while not source.is_over:
                time.sleep(LOOK_EVERY_S)
                display.show(source.look())
    except KeyboardInterrupt:
        return
    finally:
        source.close()
    print_line(console, f"{source.name} has finished")
    if folder is not None:
        print_result(console, folder)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keep lines of a log out of the view, which says the same."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    try:
        yield
    finally:
        structlog.configure(**before)


def _source(run: str, key: Path | None) -> tuple[LocalRun | RemoteRun, RunFolder | None]:
    """Open the run that a person names.

    Raises:
        SettingsError: There is no such run, or its address comes without a key.
    """
    if "://" not in run:
        if key is not None:
            raise SettingsError(
                f"--key must be with tcp://HOST:PORT/NAME of a broker, got it with {run}; a run of "
                f"this machine needs none"
            )
        folder = run_folder_of(Path(run))
        return LocalRun(folder), folder
    address = Address.parse(run)
    if key is None:
        raise SettingsError(
            f"--key must be the file of an observer's key, got none with {run}; on the run's "
            f"machine: nyala keys add ana --role observer --in RUN"
        )
    return RemoteRun(address, key), None
