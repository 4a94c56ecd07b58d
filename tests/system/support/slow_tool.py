"""An environment of several turns whose answers take a while: its episodes last for seconds."""

from __future__ import annotations

import asyncio

from actors.environments.base import Score, Segment, Step

TURNS = 5
ANSWER_S = 0.4


class Talk:
    """Says the same after each turn but the last."""

    prompt = "ab"
    answer = "a"
    demonstration = (Segment("bca", True), Segment("c", False), Segment("bca", True))

    def __init__(self) -> None:
        self._left = TURNS

    async def step(self, text: str) -> Step:
        await asyncio.sleep(ANSWER_S)
        self._left -= 1
        return Step("c", done=False) if self._left else Step()

    async def score(self) -> Score:
        return Score(float(self._left))


class SlowTool:
    """Begins talks."""

    async def begin(self, index: int, seed: int, *, held_out: bool) -> Talk:
        return Talk()

    def describe(self) -> str:
        return "slow tool"
