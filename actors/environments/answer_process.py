"""Answers that are compared in processes of their own, with a limit of CPU time.

Some comparisons never end, or take all memory: those of mathematics, of formulas for reasoning-gym,
or with a regular expression of the user. Here such an answer is wrong, and another process replaces
the one that compared it. On a thread of the actor, the comparison would hold the interpreter, and
all leases would expire.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from configs.errors import RewardError

WORKER = "actors.environments.answer_worker"
PROCESSES = 4
MEMORY_MB = 2048
START_S = 60.0  # sympy takes seconds to import on a busy machine
ANSWER_S = 20.0  # of wall time, for a machine without a free core; less than a step may take
PIECE = 1 << 16  # bytes of one write or read


class AnswerScorer:
    """Scores completions; threads may share it."""

    def __init__(self, name: str, check: Callable[[Any], object]) -> None:
        """Prepare; processes start when they are first needed.

        Args:
            name: A scorer of `answer_worker.py`.
            check: Raises ValueError for a reference that no answer can be compared with; called
                in this process for an empty answer.
        """
        self._check = check
        self._idle: queue.LifoQueue[_WorkerProcess] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(_WorkerProcess(name))

    def __call__(self, text: str, reference: Any) -> float | None:
        """Return 1 for a right answer, 0 for a wrong one, None for one that cannot be read.

        An answer whose comparison does not end within 20 s, or within its CPU time, is wrong. Waits
        while four comparisons are under way.

        Raises:
            ValueError: No answer can be compared with the reference.
            RewardError: No process can be started.
        """
        if not text.strip():
            self._check(reference)
            return None
        verdict = self.request_verdict(text, reference)
        if isinstance(verdict, str):
            raise ValueError(verdict)
        return None if verdict is None else float(verdict)

    def request_verdict(self, text: str, reference: Any) -> Any:
        """Return the worker's verdict on a text, as `__call__` waits for it.

        Returns:
            What the scorer returned, a text that says what is wrong with the reference, or False
            where the comparison did not end.

        Raises:
            RewardError: No process can be started.
        """
        process = self._idle.get()
        try:
            return process.ask_question({"text": text, "reference": reference})
        finally:
            self._idle.put(process)


class _WorkerProcess:
    """A worker, started when it is first asked and again after it was ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None

    def ask_question(self, question: dict[str, Any]) -> Any:
        """Return the worker's verdict; False = the comparison did not end."""
        line = json.dumps(question, default=str).encode() + b"\n"
        for _ in range(2):  # it may have died since it was asked last
            if self._process is None:
                self._start()
            try:
                return self._reply_to(line, ANSWER_S)
            except BrokenPipeError:
                if self._end() == -signal.SIGPROF:  # the limit of CPU time
                    break
            except TimeoutError:
                self._end()
                break
        return False

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, self._name, str(MEMORY_MB)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the actor
                bufsize=0,
            )
        except OSError as error:
            raise RewardError(
                f"a process of {self._name} must start, got {error}; look at the memory and the "
                "processes of this machine"
            ) from error
        assert self._process.stdin is not None
        self._finalizer = weakref.finalize(self, _ended, self._process)
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._reply_to(b"", START_S)
        except (BrokenPipeError, TimeoutError) as error:
            self._end()
            how = "its end" if isinstance(error, BrokenPipeError) else "no answer"
            command = f"{sys.executable} -P -m {WORKER} {self._name} {MEMORY_MB}"
            raise RewardError(
                f"a process of {self._name} must be ready within {START_S:g} s, got {how}; run "
                f"`{command}`, which shows why, or free memory of this machine"
            ) from error

    def _reply_to(self, question: bytes, limit_s: float) -> Any:
        """Send a question, and return the reply.

        Raises:
            BrokenPipeError: The process has ended.
            TimeoutError: The process takes too long.
        """
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        deadline, rest, line = time.monotonic() + limit_s, memoryview(question), b""
        asked, told = self._process.stdin.fileno(), self._process.stdout.fileno()
        while rest:
            _wait_for(asked, select.POLLOUT, deadline)
            rest = rest[os.write(asked, rest[:PIECE]) :]
        while not line.endswith(b"\n"):
            _wait_for(told, select.POLLIN, deadline)
            part = os.read(told, PIECE)
            if not part:
                raise BrokenPipeError
            line += part
        return json.loads(line)

    def _end(self) -> int:
        """End the process; return its status."""
        self._process = None
        return self._finalizer() or 0


def _ended(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:
        pass
    return process.returncode


def _wait_for(pipe: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
