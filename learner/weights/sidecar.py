"""Rank 0's hold on its publisher process: start, wake, watch, restart.

All of it happens in one thread, which also starts the process: Linux ties "die with the parent" to
the thread that forked. The training thread only ever writes one byte.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import structlog

from configs.errors import WeightsError

from .publisher_process import PublisherSettings

log = structlog.get_logger()

START_TIMEOUT_S = 30.0
"""A loaded machine may take a while to start Python."""
ALIVE_TIMEOUT_S = 15.0
"""It says `alive` every second, and importing torch can hold its loop for several."""
MAX_RESTARTS = 10
RESTART_WINDOW_S = 600.0
STOP_TIMEOUT_S = 2.0
BACK_OFF_S = (0.0, 0.2, 1.0, 5.0)
"""Pause before the first, second, ... restart within the window; the last one repeats."""

RANKS_ONLY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The ranks are on one machine and talk over loopback; the publisher's actors may be elsewhere."""


class Sidecar:
    """The publisher process of this learner.

    Args:
        settings: Its command line. A restarted process asks for the same port as its predecessor.
        on_death: Called between the death of one process and the start of the next.
        on_line: Called with each JSON line but `alive`, in the watching thread.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        *,
        on_death: Callable[[], None],
        on_line: Callable[[dict[str, object]], None],
    ) -> None:
        self._settings = settings
        self._on_death = on_death
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts: deque[float] = deque()
        self._listening = threading.Event()
        self._ended = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._watch, name="publisher-watch", daemon=True)
        self._endpoint = ""
        self._was_heard = False

    @property
    def endpoint(self) -> str:
        """Where the publisher listens."""
        return self._endpoint

    @property
    def pid(self) -> int:
        """Process id of the present publisher; 0 = none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process and wait until it listens.

        Raises:
            WeightsError: it does not come up.
        """
        self._thread.start()
        if not self._listening.wait(START_TIMEOUT_S) or self._failure:
            reason = self._failure or f"it was not listening after {START_TIMEOUT_S:.0f} s"
            self.close()
            raise WeightsError(f"the weight publisher must start, but {reason}; see the log")

    def wake(self) -> None:
        """Say that a version is sealed. Never waits: a full pipe means that it has yet to look."""
        process = self._process
        if process is None or process.stdin is None:
            return  # between two lives: the next one looks by itself
        try:
            os.write(process.stdin.fileno(), b"\n")
        except (OSError, ValueError):  # full, just died, or closed
            return

    def check(self) -> None:
        """Raise if the publisher has died too often.

        Raises:
            WeightsError: it is not started again.
        """
        if self._failure:
            raise WeightsError(f"the weight publisher must live, but {self._failure}; see the log")

    def close(self) -> None:
        """End the process and its thread."""
        self._ended.set()
        process = self._process
        if process is not None:
            _stop(process)
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._ended.is_set():
            process = self._process = self._spawn()
            assert process.stdout is not None
            with process.stdout:
                reason = self._listen_to(process.stdout)
                self._process = None
                _stop(process, patience_s=0.0)
            if self._ended.is_set():
                return
            log.warning("weight publisher died", reason=reason, code=process.returncode)
            self._on_death()
            if not self._may_restart():
                self._failure = f"it died {MAX_RESTARTS} times, last: {reason}"
                self._listening.set()
                return

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = self._settings
        if self._was_heard:  # actors reconnect to the same port by themselves
            settings = replace(settings, endpoint=self._endpoint)
        self._was_heard = False  # and if that port is taken now, the next try asks for any
        process = subprocess.Popen(
            [sys.executable, "-m", "learner.weights.publisher_process", *settings.arguments()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],  # where `learner` is importable, also when not installed
            env=_environment(),
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _listen_to(self, stdout: IO[bytes]) -> str:
        """Read lines until the process is silent or gone; returns which."""
        unread = b""
        while True:
            readable, _, _ = select.select([stdout], [], [], ALIVE_TIMEOUT_S)
            if not readable:
                return f"it has said nothing for {ALIVE_TIMEOUT_S:.0f} s"
            arrived = os.read(stdout.fileno(), 65536)
            if not arrived:
                return "it has ended"
            *lines, unread = (unread + arrived).split(b"\n")
            for line in lines:
                self._heard(json.loads(line))

    def _heard(self, line: dict[str, object]) -> None:
        if line["event"] == "listening":
            self._endpoint, self._was_heard = str(line["endpoint"]), True
            self._listening.set()
        if line["event"] != "alive":
            self._on_line(line)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._restarts.append(now)
        while now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) > MAX_RESTARTS:
            return False
        pause_s = BACK_OFF_S[min(len(self._restarts) - 1, len(BACK_OFF_S) - 1)]
        return not self._ended.wait(pause_s)


def _environment() -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if name not in RANKS_ONLY}
    return inherited | {"OMP_NUM_THREADS": "1"}  # it computes nothing


def _stop(process: subprocess.Popen[bytes], *, patience_s: float = STOP_TIMEOUT_S) -> None:
    """End a publisher: the end of stdin asks for it, SIGKILL does not ask."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
