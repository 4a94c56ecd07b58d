"""Environments of one turn whose step takes a while, by `await` or in a thread.

Settings: `wait_s`, seconds.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from actors.environments.base import Score, Segment, Step


class Question:
    """Any text is an answer."""

    prompt = "7+8="
    answer = None
    demonstration: tuple[Segment, ...] = ()

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def step(self, text: str) -> Any:
        """Take any text."""
        raise NotImplementedError

    def score(self) -> Score:
        """Give every answer the same."""
        return Score(0.0)


class AwaitedQuestion(Question):
    """Answers after an `await`."""

    async def step(self, text: str) -> Step:  # noqa: ARG002 - every text is an answer
        """Wait as for a tool over the network."""
        await asyncio.sleep(self.wait_s)
        return Step()


class BlockingQuestion(Question):
    """Answers after a call that blocks."""

    def step(self, text: str) -> Step:  # noqa: ARG002 - every text is an answer
        """Wait as for a tool that knows no `async`."""
        time.sleep(self.wait_s)
        return Step()


class Awaited:
    """Waits in an event loop."""

    question: type[Question] = AwaitedQuestion

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s

    def begin(self, index: int, seed: int, *, held_out: bool) -> Question:  # noqa: ARG002 - all are alike
        """Ask the one question there is."""
        return self.question(self._wait_s)

    def describe(self) -> str:
        """Name and settings."""
        return f"{type(self).__name__} {self._wait_s}"


class Blocking(Awaited):
    """Waits in threads."""

    is_thread_safe = True
    question = BlockingQuestion
