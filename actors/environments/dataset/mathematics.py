"""Scorer `math-verify`: expressions that are equal, compared by the package of that name.

It lives in processes of its own (`math_worker.py`): some expressions are never done with, or take
all memory. Such an answer is wrong, and its process makes way for another.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

from actors.environments.final_answer import marked_answer, without_thinking
from configs.errors import RewardError, SettingsError

PACKAGE = "math-verify"
OLDEST = (0, 9)
PROCESSES = 4
MEMORY_MB = 2048
START_S = 60.0  # sympy takes seconds to import on a busy machine
ANSWER_S = 8.0  # parsing twice and comparing once, each of which has a limit of its own
LONGEST = 1 << 14  # characters of a completion that are looked at, from its end


class MathScorer:
    """Scores completions; threads may share it."""

    def __init__(self) -> None:
        """Look for the package; processes start when they are first needed.

        Raises:
            SettingsError: It is not installed, or too old.
        """
        try:
            installed = metadata.version(PACKAGE)
        except metadata.PackageNotFoundError:
            installed = "none"
        if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
            raise SettingsError(
                f"scorer: math-verify must have {PACKAGE} >= {'.'.join(map(str, OLDEST))}, got "
                f"{installed}; install Nyala with the extra `math`"
            )
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(_Process())

    def __call__(self, text: str, reference: Any) -> float | None:
        """Return 1 where both are equal, 0 where not, None where there is no answer to read.

        Raises:
            ValueError: The reference is empty, or nothing in it can be read.
            RewardError: No process can be started.
        """
        gold = str(reference).strip()
        if not gold:
            raise ValueError("must be mathematics, got nothing")
        marked = marked_answer(text)
        answer = without_thinking(text)[-LONGEST:] if marked is None else marked[:LONGEST]
        if not answer.strip():
            return None
        process = self._idle.get()
        try:
            asked = {"gold": gold, "answer": answer, "is_marked": marked is not None}
            verdict = process.ask(json.dumps(asked))
        finally:
            self._idle.put(process)
        if isinstance(verdict, str):
            raise ValueError(verdict)
        return None if verdict is None else float(verdict)


class _Process:
    """A worker, started when it is first asked and again after it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str) -> Any:
        """Return the worker's answer; False = it did not come to one."""
        for _ in range(2):  # it may have died since it was asked last
            if self._process is None:
                self._start()
            try:
                return self._reply_to(question, ANSWER_S)
            except BrokenPipeError:
                self._end()
            except TimeoutError:
                self._end()
                break
        return False

    def __del__(self) -> None:
        if self._process is not None:
            self._end()

    def _start(self) -> None:
        module = "actors.environments.dataset.math_worker"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(MEMORY_MB)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the actor
            )
        except OSError as error:
            raise RewardError(f"math-verify must have a process, got {error}") from error
        first = json.dumps({"gold": "1", "answer": "1", "is_marked": True})
        try:
            self._reply_to(first, START_S)
        except (BrokenPipeError, TimeoutError) as error:
            self._end()
            raise RewardError("math-verify must find 1 equal to 1, got no answer") from error

    def _reply_to(self, question: str, limit_s: float) -> Any:
        """Ask, and return the reply.

        Raises:
            BrokenPipeError: The process has ended.
            TimeoutError: It takes too long.
        """
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        poll, deadline, line = select.poll(), time.monotonic() + limit_s, b""
        pipe = self._process.stdout.fileno()
        poll.register(pipe, select.POLLIN)
        self._process.stdin.write(question.encode() + b"\n")
        self._process.stdin.flush()
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(pipe, 1 << 16)
            if not part:
                raise BrokenPipeError
            line += part
        return json.loads(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:
            pass
