"""The runs of a sweep, started in turn and watched: `--jobs` of them at a time.

waiting -> running -> finished
-> failed: the others go on; the next sweep tries it again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import NyalaError
from console.api.up_process import UpProcess

from .grid import Point

LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Planned:
    """A run to be made."""

    point: Point
    arguments: Sequence[str]
    """Of `nyala up`."""
    log: Path
    stop_s: float
    """Longest time of an orderly end."""


def run_all(
    planned: Iterator[Planned],
    *,
    jobs: int,
    on_end: Callable[[Planned, str | None], None],
) -> None:
    """Make all runs, some at a time; an interrupt stops those that run, in order.

    Args:
        planned: In the order in which they are started; each is asked for when its turn comes.
        jobs: How many at a time.
        on_end: Called with the reason if it failed.
    """
    running: dict[UpProcess, Planned] = {}
    try:
        while True:
            while len(running) < jobs and (run := next(planned, None)) is not None:
                process = UpProcess(run.arguments, log=run.log, stop_s=run.stop_s, detached=False)
                running[process] = run
            if not running:
                return
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
