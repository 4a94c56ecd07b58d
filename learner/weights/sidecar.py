"""The publisher process as rank 0 sees it: start, wake, watch, restart.

One thread starts the process and watches it, because Linux ties "die with the parent" to the thread
that forked. The training thread only ever writes one byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import structlog
from msgspec import structs

from configs.errors import WeightsError, quoted
from configs.worker import Worker

from .publisher_process import PublisherSettings

log = structlog.get_logger()

START_TIMEOUT_S = 30.0
"""A loaded machine may take a while to start Python."""
ALIVE_TIMEOUT_S = 15.0
"""The publisher reports `alive` every second; importing torch can block it for several."""
MAX_RESTARTS = 10
RESTART_WINDOW_S = 600.0
STOP_TIMEOUT_S = 2.0
BACK_OFF_S = (0.0, 0.2, 1.0, 5.0)
"""Pause before the first, second, ... restart within the window; the last one repeats."""


class Sidecar:
    """The publisher process of this learner.

    Args:
        settings: Command line of the process. A restarted process asks for the same port.
        on_death: Called between the death of one process and the start of the next.
        on_line: Called with each report except `alive`, in the watching thread.
        environment: Variables that the process inherits; None = this process's.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        *,
        on_death: Callable[[], None],
        on_line: Callable[[dict[str, object]], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._environment = os.environ if environment is None else environment
        self._on_death = on_death
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts: deque[float] = deque()
        self._has_started = threading.Event()
        self._is_closing = threading.Event()
        self._watch = Worker(self._keep_alive, name="publisher-watch")
        self._endpoint = self._bound = ""
        self._is_listening = False

    @property
    def endpoint(self) -> str:
        """Address at which actors reach the publisher."""
        return self._endpoint

    @property
    def pid(self) -> int:
        """Process id of the present publisher; 0 = none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process and wait until it listens.

        Raises:
            WeightsError: The process does not listen within `START_TIMEOUT_S`; it is ended.
        """
        self._watch.start()
        try:
            is_in_time = self._has_started.wait(START_TIMEOUT_S)
            self.check_publisher()
            if not is_in_time:
                raise _failure(f"was not listening after {START_TIMEOUT_S:.0f} s")
        except BaseException:
            self.close()
            raise

    def wake(self) -> None:
        """Notify the publisher of a sealed version. Never waits: a full pipe has a notice."""
        process = self._process
        if process is None or process.stdin is None:
            return  # between two processes: the next one looks by itself
        try:
            os.write(process.stdin.fileno(), b"\n")
        except (OSError, ValueError):  # full, just died, or closed
            return

    def check_publisher(self) -> None:
        """Raise the error that ended the watching thread; no publisher is started after that.

        Raises:
            WeightsError: The publisher has died too often.
            LostLineage: A newer learner has taken the run over.
        """
        self._watch.raise_if_failed()

    def close(self) -> None:
        """End the process and its thread; the process is killed after `STOP_TIMEOUT_S`."""
        self._is_closing.set()
        process = self._process
        if process is not None:
            _stop(process)
        with contextlib.suppress(Exception):  # `check_publisher` raises it where one is needed
            self._watch.join(STOP_TIMEOUT_S)

    def _keep_alive(self) -> None:
        try:
            while True:
                reason = self._run_one()
                if self._is_closing.is_set():
                    return
                log.warning("weight publisher died", reason=reason)
                self._on_death()
                if not self._may_restart(reason):
                    return
        finally:
            self._has_started.set()  # it has, or never will

    def _run_one(self) -> str:
        """Start a process and read what it reports; returns why it is no longer of use."""
        try:
            process = self._process = self._spawn()
        except OSError as error:  # such as ENOMEM, which may pass
            return f"it cannot be started: {error}"
        assert process.stdout is not None
        try:
            with process.stdout:
                reason = self._read_reports(process.stdout)
        finally:
            self._process = None
            _stop(process, patience_s=0.0)
        return f"{reason} (exit code {process.returncode})"

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = self._settings
        if self._is_listening:  # actors reconnect to the same port by themselves
            settings = structs.replace(settings, endpoint=self._bound)
        process = subprocess.Popen(
            [sys.executable, "-m", "learner.weights.publisher_process", settings.argument()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],  # where `learner` is importable, also when not installed
            env={**self._environment, "OMP_NUM_THREADS": "1"},  # it computes nothing
        )
        self._is_listening = False  # if that port is taken now, the next try asks for any
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _read_reports(self, stdout: IO[bytes]) -> str:
        """Read lines until the process is silent or gone; returns which."""
        unread = b""
        while True:
            readable, _, _ = select.select([stdout], [], [], ALIVE_TIMEOUT_S)
            if not readable:
                return f"it has been silent for {ALIVE_TIMEOUT_S:.0f} s"
            arrived = os.read(stdout.fileno(), 65536)
            if not arrived:
                return "it has ended"
            *lines, unread = (unread + arrived).split(b"\n")
            for line in lines:
                self._on_report(line)

    def _on_report(self, text: bytes) -> None:
        try:
            line = json.loads(text)
            event = line["event"]
        except (ValueError, TypeError, KeyError):  # cut off, or printed by a library
            log.warning("line of the weight publisher ignored", line=quoted(text, 200))
            return
        if event == "listening":
            self._endpoint, self._bound = str(line["endpoint"]), str(line["bound"])
            self._is_listening = True
        if event != "alive":
            self._on_line(line)
        if event == "listening":
            self._has_started.set()

    def _may_restart(self, reason: str) -> bool:
        """Pause before the next start; False when closing.

        Raises:
            WeightsError: The process has died too often.
        """
        now = time.monotonic()
        self._restarts.append(now)
        while now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) > MAX_RESTARTS:
            raise _failure(f"died more than {MAX_RESTARTS} times, the last time because {reason}")
        pause_s = BACK_OFF_S[min(len(self._restarts) - 1, len(BACK_OFF_S) - 1)]
        return not self._is_closing.wait(pause_s)


def _failure(reason: str) -> WeightsError:
    return WeightsError(
        f"the weight publisher must run, got one that {reason}; mend what its lines in the "
        "learner's log show (`nyala logs`)"
    )


def _stop(process: subprocess.Popen[bytes], *, patience_s: float = STOP_TIMEOUT_S) -> None:
    """End a publisher: by the end of its stdin, and if it goes on, by SIGKILL."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
