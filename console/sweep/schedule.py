"""The runs of a sweep, started in turn and watched: `--jobs` of them at a time.

waiting -> running -> finished
-> failed: the others go on; the next sweep tries it again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import NyalaError
from console.api.up_process import UpProcess

LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Planned:
    """A run to be made."""

    name: str
    arguments: Sequence[str]
    """Of `nyala up`."""
    log: Path
    stop_s: float
    """Longest time of an orderly end."""


def run_all(
    planned: Sequence[Planned],
    *,
    jobs: int,
    on_start: Callable[[Planned], None],
    on_end: Callable[[Planned, str | None], None],
) -> None:
    """Make all runs, some at a time; an interrupt stops those that run, in order.

    Args:
        planned: In the order in which they are started.
        jobs: How many at a time.
        on_start: Called before a run is started.
        on_end: Called with the reason if it failed.
    """
    waiting = list(planned)
    running: dict[UpProcess, Planned] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                on_start(run)
                process = UpProcess(run.arguments, log=run.log, stop_s=run.stop_s, detached=False)
                running[process] = run
            for process in [each for each in running if not each.is_alive]:
                on_end(running.pop(process), _failure(process))
            time.sleep(LOOK_EVERY_S)
    finally:
        for process in running:
            process.ask_to_stop()
        for process in running:
            process.stop()


def _failure(process: UpProcess) -> str | None:
    try:
        process.check()
    except NyalaError as error:
        return str(error)
    return None
