"""Tasks of verifiers: a taskset of ours, a game of TextArena, and an environment of OpenEnv."""

from __future__ import annotations

LETTERS = """
from pathlib import Path

import verifiers.v1 as vf

HAS_FAILED = Path(__file__).with_suffix(".failed")

class LettersData(vf.TaskData):
    letters: str

class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=0.5)
    async def share(self, trace) -> float:
        if not HAS_FAILED.exists():
            HAS_FAILED.touch()
            raise ValueError("the letters were not there, once")
        said = "".join(str(node.message.content or "") for node in trace.nodes if node.sampled)
        return sum(letter in self.data.letters for letter in said) / max(1, len(said))

class Letters(vf.Taskset[LettersTask, vf.TasksetConfig]):
    def load(self):
        for n in range(200):
            data = LettersData(name=f"n {n}", prompt=f"write {n}", letters="abcdefghijklm")
            yield LettersTask(data, self.config.task)

__all__ = ["Letters"]
"""
"""A module `letters`: the reward is the share of some letters, and its first judgement fails."""

WORDS = ("able", "baker", "candle", "dinner", "engine", "flower", "garden", "hammer")
"""Stands in for NLTK's list of words, which verifiers would fetch from another host."""

COUNTER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    text: str

class Heard(Observation):
    text: str = ""

class Counter(Environment):
    '''Three turns, each rewarded with its share of lower-case letters.'''

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="one", step_count=0)

    def reset(self, seed=None, episode_id=None, **more):
        self._state = State(episode_id=episode_id or "one", step_count=0)
        return Heard(text="write", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **more):
        self._state.step_count += 1
        small = sum(letter.islower() for letter in action.text) / max(1, len(action.text))
        return Heard(text="more", done=self._state.step_count == 3, reward=small)

    @property
    def state(self):
        return self._state

app = create_fastapi_app(Counter, Said, Heard, max_concurrent_envs=16)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""
"""A server of OpenEnv."""
