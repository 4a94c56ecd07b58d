"""A run as a Python object: its figures, samples and model, and ways to wait for it and to end it.

    create_run -> running -> finished
    create_run -> running -> unfinished (stopped or failed) -> create_run ...

Everything is read from the run's folder when it is asked for, so it is as new as the folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.errors import DeadlineError, SettingsError
from console.display.json_lines import read_rows
from console.live.stop import stop_run
from console.run.run_folder import RunFolder, RunState
from learner.reporting.sample_files import read_samples
from learner.reporting.sample_lines import SampleLine

from .up_process import UpProcess

LOOK_EVERY_S = 0.5


class Run:
    """One run; made by `create_run` or `open_run`.

    Example:
        run = nyala.create_run("mine.yaml", learner={"lr": 1e-6})
        run.wait()
        print(run.summary["held_out_accuracy_after"], run.model_path)
    """

    def __init__(self, folder: Path, process: UpProcess | None = None) -> None:
        self._files = RunFolder(folder)
        self._process = process

    def __repr__(self) -> str:
        return f"<nyala.Run {self.id}: {self.state}, {self.folder}>"

    @property
    def id(self) -> str:
        """Name of the run: `run.name`."""
        return self._files.path.name

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self._files.path

    @property
    def report(self) -> str:
        """Link to `report.html`, which is written when the run ends."""
        return self._files.report.as_uri()

    @property
    def state(self) -> str:
        """`running`, `finished` or `unfinished`."""
        if self.is_running:
            return "running"
        return "finished" if self._files.state is RunState.FINISHED else "unfinished"

    @property
    def is_running(self) -> bool:
        """Whether a `nyala up` of this machine works on it, ours or another."""
        return self._files.is_held if self._process is None else self._process.is_alive

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` so far, one for each batch."""
        return read_rows(self._files.metrics)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of `eval.jsonl` so far."""
        return read_rows(self._files.evaluations)

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of the whole run.

        Raises:
            SettingsError: It has not finished.
        """
        self._refuse_unfinished("a summary")
        return dict(self._files.read_summary())

    @property
    def model_path(self) -> Path:
        """The trained model, a Hugging Face directory.

        Raises:
            SettingsError: The run has not finished.
        """
        self._refuse_unfinished("a model")
        return self._files.model

    def samples(self, *, kind: str | None = None) -> Iterator[SampleLine]:
        """Read the texts that were kept, the oldest first.

        Args:
            kind: `train` or `eval`; None = both.
        """
        lines = read_samples(self._files.path)
        return (line for line in lines if kind is None or line.kind == kind)

    def wait(self, timeout_s: float | None = None, *, quiet: bool = False) -> dict[str, Any]:
        """Wait until the run has finished; return its summary.

        An interrupt (Ctrl-C, the stop button of a notebook) ends the waiting, not the run.

        Args:
            timeout_s: Longest wait; None = as long as it takes.
            quiet: Do not print the progress of the run.

        Raises:
            DeadlineError: The time is over; the run goes on.
            NyalaError: The run has failed or was stopped; the text has the reason.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        log = None if self._process is None or quiet else self._process.log
        shown = 0
        while self.is_running:
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.id} must finish within {timeout_s:g} s, got a run that goes on; "
                    "wait for it again, or end it with stop()"
                )
            shown = _print_new(log, shown)
            time.sleep(LOOK_EVERY_S)
        _print_new(log, shown)
        if self._process is not None:
            self._process.check()
        return self.summary

    def stop(self) -> None:
        """End the run as Ctrl-C ends `nyala up`: a checkpoint is written, and it can go on later.

        Raises:
            NyalaError: It does not end in time, or is another user's.
        """
        if self._process is None:
            stop_run(self._files)
        else:
            self._process.stop()

    def _refuse_unfinished(self, what: str) -> None:
        if self._files.state is not RunState.FINISHED:
            raise SettingsError(
                f"{self.id} must have finished to have {what}, got a run that is {self.state}; "
                "wait() for it"
            )


def _print_new(log: Path | None, shown: int) -> int:
    """Print what a log has beyond so many bytes; return how many are shown now."""
    if log is None:
        return shown
    with log.open("rb") as file:
        file.seek(shown)
        whole, newline, _ = file.read().rpartition(b"\n")
    if newline:
        print(whole.decode(errors="replace"))
    return shown + len(whole) + len(newline)
