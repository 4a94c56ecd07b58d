"""Environments in which some episodes take far longer than others: a tool, and many turns.

Nothing is to be learnt: every answer is worth the same.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from actors.environments.base import Score, Segment, Step

PROMPT = "7+8="


class Episode:
    """Any text is an answer; `turns` of them are asked for."""

    prompt = PROMPT
    answer = None
    demonstration: tuple[Segment, ...] = ()

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._turns = 0

    async def step(self, text: str) -> Step:
        """Take any text, and ask for another until the last one."""
        self._turns += 1
        if self._turns == 1:
            self._last = await self._environment.first(text)
        return Step() if self._turns >= self._last else Step(" ", done=False)

    def score(self) -> Score:
        """Give every answer the same."""
        return Score(0.0)


class SlowTool:
    """Two turns with a tool between them that takes `tool_s`."""

    def __init__(self, *, tool_s: float) -> None:
        self._tool_s = tool_s

    def begin(self, index: int, seed: int, *, held_out: bool) -> Episode:  # noqa: ARG002 - all are alike
        """Ask."""
        return Episode(self)

    async def first(self, text: str) -> int:  # noqa: ARG002 - the tool reads nothing
        """Run the tool, and return the number of turns."""
        await asyncio.sleep(self._tool_s)
        return 2

    def describe(self) -> str:
        """Name and settings."""
        return f"SlowTool {self._tool_s}"


class HeavyTail:
    """As many turns as a log-normal draw says, which follows from the first answer.

    Its median is `median` turns and its sigma `sigma`; no episode has more than `most`.
    """

    def __init__(self, *, median: float, sigma: float, most: int) -> None:
        self._median, self._sigma, self._most = median, sigma, most

    def begin(self, index: int, seed: int, *, held_out: bool) -> Episode:  # noqa: ARG002 - all are alike
        """Ask."""
        return Episode(self)

    async def first(self, text: str) -> int:
        """Draw the number of turns."""
        drawn = self._median * random.Random(text).lognormvariate(0.0, self._sigma)
        return max(1, min(self._most, round(drawn)))

    def describe(self) -> str:
        """Name and settings."""
        return f"HeavyTail {self._median} {self._sigma} {self._most}"
