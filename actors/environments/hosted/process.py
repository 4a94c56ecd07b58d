"""One process of an environment host, and the calls that wait for it.

    submit --a thread--> standard input ... standard output --a thread--> the call's future

A `HostProcess` is independent of event loops: checks use it from several. When its process has
ended, its calls fail, and so do later ones; `environment.py` starts the next process.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from configs.child import MalformedFrame
from configs.errors import quoted
from configs.worker import Worker

from .program import OLD_PYTHON
from .serving import HUNG, pack_message, read_message

log = structlog.get_logger()

PROGRAM = Path(__file__).with_name("program.py")
EXIT_S = 5.0
REASONS = {
    HUNG: "too many of its calls never end",
    OLD_PYTHON: "its Python is older than 3.11",
}


class HostError(RuntimeError):
    """An environment failed in its host, or the host has ended."""

    is_ours = False
    """The text is Nyala's own: a whole sentence about a setting."""


class HostProcess:
    """A host process, which starts at once."""

    def __init__(self, python: Path, *, threads: int) -> None:
        self._command = [str(python), str(PROGRAM), str(threads)]
        self._lock = threading.Lock()
        self._calls: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._heard_at = time.monotonic()
        self._is_unwanted = False
        self.end_reason: str | None = None
        """Reason for its end; None = the process has not ended."""
        # The thread that starts it also outlasts it: the kernel ends a process with that thread.
        Worker(self._read, name="environment-host").start()

    @property
    def silent_s(self) -> float:
        """Time since its last sign of life."""
        return time.monotonic() - self._heard_at

    @property
    def pid(self) -> int | None:
        """Process id; None until the process has started."""
        return None if self._process is None else self._process.pid

    def submit(self, do: str, **arguments: Any) -> Future[dict[str, Any]]:
        """Send a request; its future gets the result, or a `HostError`.

        Raises:
            HostError: The process has ended, or the arguments are too long or no plain data.
        """
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self.end_reason is not None:
                raise HostError(f"environment host: {self.end_reason}")
            self._number += 1
            frame = _pack_request({"call": self._number, "do": do, **arguments})
            self._calls[self._number] = future
        self._requests.put(frame)
        return future

    def drop_episode(self, episode: int) -> None:
        """Tell the process to forget an episode."""
        self._requests.put(pack_message({"do": "leave", "episode": episode}))

    def kill(self, reason: str) -> None:
        """Kill the process and its children; its calls fail with this reason."""
        with self._lock:
            self.end_reason = self.end_reason or reason
        self._is_unwanted = True
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _read(self) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the actor, which then ends this one
            )
        except OSError as error:
            self._end(f"it cannot be started: {error}")
            return
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        if self._is_unwanted:
            self.kill("")
        Worker(self._write, name="environment-requests").start()
        reason = None
        try:
            while (reply := read_message(process.stdout.read)) is not None:
                self._heard_at = time.monotonic()
                if reply:
                    self._settle(reply)
        except (MalformedFrame, KeyError, TypeError) as error:
            reason = (
                "code of the environment wrote into the answers of its host, which read "
                f"{quoted(error, 200)}"
            )
        finally:
            self._end(reason or self._status(process))
            self._requests.put(None)
            with suppress(ProcessLookupError):  # with what it started
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_S)

    def _write(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError), self._process.stdin as requests:
            while (frame := self._requests.get()) is not None:
                requests.write(frame)
                if self._requests.empty():
                    requests.flush()

    def _settle(self, reply: Mapping[str, Any]) -> None:
        """Answer a call, unless its caller has left."""
        future = self._calls.pop(reply["call"])
        if not future.set_running_or_notify_cancel():
            return
        if "found" in reply:
            future.set_result(reply["found"])
            return
        error = HostError(str(reply["error"]))
        error.is_ours = bool(reply["is_ours"])
        future.set_exception(error)

    def _status(self, process: subprocess.Popen[bytes]) -> str:
        try:
            status = process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "it has closed its answers"
        return REASONS.get(status, f"it ended with status {status}")

    def _end(self, reason: str) -> None:
        with self._lock:
            self.end_reason = self.end_reason or reason
            calls, self._calls = list(self._calls.values()), {}
        if not self._is_unwanted:
            log.warning("environment host ended", reason=self.end_reason, calls=len(calls))
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(HostError(f"environment host: {self.end_reason}"))


def _pack_request(request: Mapping[str, Any]) -> bytes:
    try:
        return pack_message(request)
    except ValueError as error:
        raise HostError(str(error)) from None
