"""Runs from Python: what `import nyala` offers.

Each run is a `nyala up` in a process of its own; `nyala sweep` starts its runs so too.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import DeadlineError, NyalaError, SettingsError
from configs.json_lines import LineFollower, read_rows
from console.live.stop import stop_limit_s, stop_run
from console.run.process_guard import ProcessGuard
from console.run.run_folder import VERSIONS_FILE, RunFolder, RunState, run_folder_of, settings_of
from console.run.user_files import resolve
from learner.reporting.samples import SampleLine, read_samples

# --------------------------------------------------------------------------------------------------
# `nyala up` as a process of a Python program, which it does not outlive unless it is asked to.
#
#     start -> begun (its checks have passed) -> ended
#
# It has a session of its own: an interrupt of the program is not one of the run. When the program
# ends, however it does, a guard stops the run as Ctrl-C would.

UP: tuple[str, ...] = (
    sys.executable,
    "-P",
    "-c",
    "from console.main import app; app(prog_name='nyala')",
    "up",
)
BEGIN_S = 900.0  # of its checks: a model's configuration may have to come from the hub
POLL_UP_EVERY_S = 0.1
STOPPED = 130
REFUSED = 2
LAST_LINES = 10  # of its output, in the text of an error


class UpProcess:
    """One process of `nyala up`, which is stopped when this program ends unless it is detached."""

    def __init__(
        self, arguments: Sequence[str], *, log: Path, stop_s: float, detached: bool
    ) -> None:
        """Start the process.

        Args:
            arguments: Arguments of the verb.
            log: File for the output; an earlier one is overwritten.
            stop_s: Longest time of an orderly end, seconds.
            detached: Whether the process goes on when this program has ended.
        """
        self.log = log
        self._stop_s = stop_s
        self._is_asked = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*UP, *arguments, "--plain"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = None if detached else ProcessGuard(grace_s=stop_s)
        if self._guard is not None:
            self._guard.add(self._process.pid)
            atexit.register(self._end_with_python)

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def wait_until_begun(self, sign: Path, before: int) -> None:
        """Wait until the checks of the process have passed, or until it has ended with code 0.

        After `BEGIN_S` (15 minutes) it is stopped.

        Args:
            sign: A file that it writes when they have.
            before: When that file was last written, nanoseconds; 0 = never.

        Raises:
            SettingsError: The process has refused to begin; the text is its own.
            NyalaError: It failed, was stopped, or did not begin in time.
        """
        deadline = time.monotonic() + BEGIN_S
        while self.is_alive and written_at(sign) == before:
            if time.monotonic() > deadline:
                self.stop()
                raise NyalaError(
                    f"`nyala up` must begin within {BEGIN_S:g} s, got checks that had not ended; "
                    f"look into {self.log} for what they wait for"
                )
            time.sleep(POLL_UP_EVERY_S)
        if not self.is_alive:
            self.check_exit_code()

    def check_exit_code(self) -> None:
        """Raise the error that ended the process; nothing while it runs or if it ended with 0.

        Raises:
            SettingsError: A setting has to be changed.
            NyalaError: The process failed, or was stopped.
        """
        code = self._process.poll()
        if code in {None, 0}:
            return
        self._forget()
        output = self.log.read_text(encoding="utf-8", errors="replace").strip()
        _, is_refused, reason = output.rpartition("nyala: ")
        last = "\n".join(output.splitlines()[-LAST_LINES:])
        if code == REFUSED:  # before the start, in one sentence; a process may be later
            raise SettingsError(reason if is_refused else last)
        how, then = f"ended with exit code {code}", "mend what its last lines say"
        if code == STOPPED:
            how, then = "was stopped", "start it again to go on"
        raise NyalaError(
            f"`nyala up` must run to the last batch, got one that {how}; {then}:\n{last}"
        )

    def ask_to_stop(self) -> None:
        """Ask the process to end in order, by SIGTERM; later calls do nothing."""
        if not self._is_asked:
            self._process.send_signal(signal.SIGTERM)  # no effect if it has ended
        self._is_asked = True

    def stop(self) -> None:
        """End the process in order, and wait until it has ended, for `stop_s` at most.

        Raises:
            NyalaError: The process has not ended by then. It is not killed.
        """
        self.ask_to_stop()
        try:
            self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            raise NyalaError(
                f"`nyala up` must end within {self._stop_s:g} s, got process {self._process.pid} "
                f"still at work; look into {self.log}, and wait longer or kill the process"
            ) from None
        self._forget()

    def _forget(self) -> None:
        """Forget the process at exit: nothing is left to end."""
        if self._guard is not None:
            self._guard.remove(self._process.pid)
            self._guard.close()
            self._guard = None
            atexit.unregister(self._end_with_python)

    def _end_with_python(self) -> None:
        if self.is_alive:
            print(
                f"nyala: this Python ends, and the run with it: process {self._process.pid} saves "
                "and stops; the same create_run goes on with it",
                file=sys.stderr,
            )
            self.stop()


def written_at(path: Path) -> int:
    """Return when a file was last written, nanoseconds; 0 = never."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


# --------------------------------------------------------------------------------------------------
# A run as a Python object: its figures, samples and model, and ways to wait for it and to end it.
#
#     create_run -> running -> finished
#     create_run -> running -> unfinished (stopped or failed) -> create_run ...
#
# Everything is read from the run's folder when it is asked for, so it is as new as the folder.

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
        """Folder of the run's files."""
        return self._files.path

    @property
    def report(self) -> str:
        """Link (`file://`) to `report.html`, which is written when the run ends."""
        return self._files.report.as_uri()

    @property
    def state(self) -> str:
        """`running`, `finished` or `unfinished`."""
        if self.is_running:
            return "running"
        return "finished" if self._files.state is RunState.FINISHED else "unfinished"

    @property
    def is_running(self) -> bool:
        """Whether a `nyala up` on this machine works on the run, this program's or another."""
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
            SettingsError: The run has not finished.
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
        """Read the texts that the run has kept, the oldest first.

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
            quiet: Do not print the progress of a run that this program has started.

        Raises:
            DeadlineError: The time is over; the run goes on.
            SettingsError: Nothing works on the run any more, and it has not finished.
            NyalaError: The run has failed or was stopped; the text has the reason.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        log = None if self._process is None or quiet else LineFollower(self._process.log)
        while self.is_running:
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.id} must finish within {timeout_s:g} s, got a run that is not done; "
                    "wait for it again, or end it with stop()"
                )
            _print_new(log)
            time.sleep(LOOK_EVERY_S)
        _print_new(log)
        if self._process is not None:
            self._process.check_exit_code()
        return self.summary

    def stop(self) -> None:
        """End the run as Ctrl-C ends `nyala up`: a checkpoint is written, and it can go on later.

        Returns when the run has ended; does nothing if no `nyala up` works on it.

        Raises:
            NyalaError: The process does not end in time, or belongs to another user.
        """
        if self._process is None:
            stop_run(self._files)
        else:
            self._process.stop()

    def _refuse_unfinished(self, what: str) -> None:
        if self._files.state is not RunState.FINISHED:
            then = "wait() for it"
            if not self.is_running:
                then = f"go on with it: nyala.create_run({str(self.folder)!r})"
            raise SettingsError(
                f"{self.id} must have finished to have {what}, got a run that is {self.state}; "
                f"{then}"
            )


def _print_new(log: LineFollower | None) -> None:
    """Print the whole lines that a log has got since the last call."""
    while log is not None and (lines := log.read()):
        print(b"".join(lines).decode(errors="replace"), end="")


# --------------------------------------------------------------------------------------------------
# Creation of a run from settings, and access to one that exists.


def create_run(
    settings: str | os.PathLike[str],
    *,
    method: str | None = None,
    fresh: bool = False,
    detached: bool = False,
    **tables: Mapping[str, object],
) -> Run:
    """Start a run on this machine, as `nyala up` does, and return as soon as it has begun.

    A run of this name that was stopped goes on from its newest checkpoint; one that has finished
    stays as it is.

    The run ends with this program: when Python ends, however it does, the run saves and stops, and
    the same call goes on with it. A kernel that is restarted is a program that ends.

    Args:
        settings: A settings file, or the folder of a run to go on with.
        method: A published method by name, such as `"GSPO"`.
        fresh: Archive an earlier run of this name and begin anew.
        detached: The run goes on when this program has ended; `nyala stop` ends it then.
        tables: Settings by table, over those of the file: `learner={"lr": 1e-6}`. A value replaces
            that of the file, tables and lists too.

    Raises:
        SettingsError: A setting is wrong, or the run cannot be started on this machine.
        NyalaError: The process failed or was stopped before the run began, or its checks took
            longer than 15 minutes.

    Example:
        run = nyala.create_run("mine.yaml", run={"name": "mine-2"}, learner={"lr": 1e-6})
    """
    overrides = list(_overrides(tables))
    typed = settings_of(Path(settings), overrides)
    folder = resolve(typed).run.folder
    sign = folder / VERSIONS_FILE
    before = written_at(sign)
    arguments = [os.fspath(settings)]
    arguments += [text for override in overrides for text in ("--set", override)]
    arguments += ["--method", method] if method is not None else []
    arguments += ["--fresh"] if fresh else []
    process = UpProcess(
        arguments,
        # Beside the folder, which `fresh` moves away.
        log=folder.with_name(f".{folder.name}.up.log"),
        stop_s=stop_limit_s(typed),
        detached=detached,
    )
    process.wait_until_begun(sign, before)
    return Run(folder, process)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Return a run that exists, whoever started it; nothing is started.

    Args:
        folder: Folder of the run, or its settings file.

    Raises:
        SettingsError: There is no such run, or its settings are still being checked.
    """
    return Run(run_folder_of(Path(folder)).path)


def _overrides(tables: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Write settings as `table.key=value`, the value as JSON, which is YAML."""
    for table, keys in tables.items():
        if not isinstance(keys, Mapping):
            raise SettingsError(
                f"{table} must be a table of settings, got {keys!r}; write {table}={{'key': value}}"
            )
        for key, value in keys.items():
            yield f"{table}.{key}={json.dumps(value, default=os.fspath)}"
