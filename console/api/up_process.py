"""`nyala up` as a process of a Python program, which it does not outlive unless it is asked to.

    start -> begun (its checks have passed) -> ended

It has a session of its own: an interrupt of the program is not one of the run. When the program
ends, however it does, a guard stops the run as Ctrl-C would.
"""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from configs.errors import NyalaError, SettingsError
from console.run.process_guard import ProcessGuard

UP: tuple[str, ...] = (
    sys.executable,
    "-P",
    "-c",
    "from console.main import app; app(prog_name='nyala')",
    "up",
)
BEGIN_S = 900.0  # of its checks: a model's configuration may have to come from the hub
LOOK_EVERY_S = 0.1
STOPPED = 130
REFUSED = 2
LAST_LINES = 10  # of its output, in the text of an error


class UpProcess:
    """One `nyala up`."""

    def __init__(
        self, arguments: Sequence[str], *, log: Path, stop_s: float, detached: bool
    ) -> None:
        """Start it.

        Args:
            arguments: Of the verb.
            log: Where its output goes.
            stop_s: Longest time of an orderly end.
            detached: It goes on when this program has ended.
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
        """Whether it works."""
        return self._process.poll() is None

    def wait_until_begun(self, sign: Path, before: int) -> None:
        """Wait until its checks have passed or it has ended.

        Args:
            sign: A file that it writes when they have.
            before: When that file was last written, nanoseconds; 0 = never.

        Raises:
            NyalaError: It has refused to begin; the text is its own.
        """
        deadline = time.monotonic() + BEGIN_S
        while self.is_alive and written_at(sign) == before:
            if time.monotonic() > deadline:
                self.stop()
                raise NyalaError(
                    f"`nyala up` must begin within {BEGIN_S:g} s, got none; look into {self.log}"
                )
            time.sleep(LOOK_EVERY_S)
        if not self.is_alive:
            self.check()

    def check(self) -> None:
        """Raise what ended it, if it was not the end of the run.

        Raises:
            SettingsError: A setting has to be changed.
            NyalaError: It failed, or was stopped.
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
        how = "was stopped" if code == STOPPED else f"ended with exit code {code}"
        raise NyalaError(f"`nyala up` must go on to the last batch, got one that {how}:\n{last}")

    def ask_to_stop(self) -> None:
        """Let it begin to end in order; asked a second time it would end at once."""
        if not self._is_asked:
            self._process.send_signal(signal.SIGTERM)  # to nobody if it has ended
        self._is_asked = True

    def stop(self) -> None:
        """End it in order, and wait until it has.

        Raises:
            NyalaError: It does not end in time.
        """
        self.ask_to_stop()
        try:
            self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            raise NyalaError(
                f"`nyala up` must end within {self._stop_s:g} s, got process {self._process.pid} "
                f"still at work; its output is {self.log}"
            ) from None
        self._forget()

    def _forget(self) -> None:
        """Let the guard go."""
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
