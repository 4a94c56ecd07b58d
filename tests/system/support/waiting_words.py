"""Words to spell backwards, by an environment that takes as long as a file says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from actors.environments.base import Step
from actors.environments.reasoning_gym import ReasoningGym


class WaitingWord:
    """A question whose answer is judged after a while."""

    def __init__(self, question: Any, wait_file: Path) -> None:
        self._question, self._wait_file = question, wait_file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._question, name)

    async def step(self, text: str) -> Step:
        await asyncio.sleep(float(self._wait_file.read_text()))
        step: Step = self._question.step(text)
        return step


class WaitingWords(ReasoningGym):
    """Settings: `wait_file`, with seconds, and those of the dataset."""

    def __init__(self, *, wait_file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._wait_file = Path(wait_file)

    def begin(self, index: int, seed: int, *, held_out: bool) -> Any:
        question = super().begin(index, seed, held_out=held_out)
        return question if held_out else WaitingWord(question, self._wait_file)
