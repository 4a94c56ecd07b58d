"""Rank 0's end of the process that delivers a run to its trackers; no process without trackers.

The process reads the run's files, so it is told only that they have grown. A write to it never
waits, and its death costs the run nothing but an alert.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from configs.settings import Settings
from learner.training.guards import Alert

from .delivery_process import END_S, FINISHED, trackers_of

log = structlog.get_logger()

CLOSE_S = END_S + 5.0  # its own deadline, and what it takes to begin
MODEL_S = 6 * 3600.0  # of a finished model that moves: 140 GB at 7 MB/s
LOOK_S = 0.2  # between two looks whether the learner is asked to stop


class Tracking:
    """The process that delivers to trackers during one life of the learner.

    Args:
        settings: Settings of the run.
    """

    def __init__(self, settings: Settings) -> None:
        run = settings.run
        absolute = run.model_copy(update={"directory": run.directory.resolve()})
        self._settings = settings.model_copy(update={"run": absolute})
        mlflow = settings.trackers.mlflow
        self._keeps_model = mlflow is not None and mlflow.register_as is not None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, if there are trackers; the run's files are those of this life."""
        if not trackers_of(self._settings.trackers, self._settings.run):
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "learner.reporting.trackers.delivery_process"],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[3],  # where `learner` is importable, also when not installed
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # Not killed with the learner's group: it delivers what W&B has in memory alone, and
            # ends by itself when stdin does.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._write(self._settings.model_dump_json().encode() + b"\n")
        os.set_blocking(self._process.stdin.fileno(), False)

    def wake(self) -> None:
        """Wake the process to look at the run's files. Never waits: a full pipe wakes it anyway."""
        self._write(b"\n")

    def alerts(self) -> list[Alert]:
        """Return an alert if the process has ended."""
        if self._process is None or self._process.poll() is None:
            return []
        why = (
            f"the process of trackers must run beside training, got one that ended with exit code "
            f"{self._process.returncode}; see why in the learner's log: the run goes on without it "
            f"until the learner starts again, and the trackers get the rest then"
        )
        return [Alert("trackers_ended", why)]

    def finish(self, *, until: Callable[[], bool]) -> None:
        """End the process of a run that has finished, once it has delivered everything.

        It is killed after `CLOSE_S`, or `MODEL_S` where a tracker takes the model.

        Args:
            until: Ends the wait when it returns True; the process is killed then.
        """
        self._write(FINISHED)
        self._end(MODEL_S if self._keeps_model else CLOSE_S, until=until)

    def close(self) -> None:
        """End the process, after `CLOSE_S` by force; the next life delivers what trackers lack."""
        self._end(CLOSE_S, until=lambda: False)

    def _end(self, limit_s: float, *, until: Callable[[], bool]) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not until():
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
                return
        log.warning("trackers have not received everything in time", limit_s=limit_s)
        process.kill()
        process.wait()

    def _write(self, line: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError, ValueError):  # full, just died, or closed
            os.write(self._process.stdin.fileno(), line)
