"""Environments of the packages themselves, played without a wrapper.

They are among the peers (`requirements/peers.lock`), which `./run test` installs apart.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from actors.environments.adapters.tools import Tools
from actors.environments.registry import try_environment
from configs.settings import RunSettings

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

GYMNASIUM = """
import gymnasium

class Guess(gymnasium.Env):
    def __init__(self):
        self.observation_space = self.action_space = gymnasium.spaces.Text(80)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1, 10**6))
        return f"1 to {self.secret}?", {}
    def step(self, action):
        return "no", 0.25, action == str(self.secret), False, {}

gymnasium.register("Guess-v0", entry_point=Guess, max_episode_steps=3)
make = gymnasium.make
"""


def needs(package: str) -> Any:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def settings(name: str, **given: Any) -> RunSettings:
    return RunSettings(model="init", environment=name, environment_settings=given)


@needs("gymnasium")
def test_gymnasium_makes_an_environment_with_its_own_limits(tmp_path):
    (tmp_path / "mine.py").write_text(GYMNASIUM)
    given = {"id": "Guess-v0", "disable_env_checker": True}

    sample, source = try_environment(settings(f"{tmp_path}/mine.py:make", **given))

    other = source.make().begin(1, 0, held_out=False)
    assert sample.prompt != other.prompt
    assert [sample.step("0").done for _ in range(3)] == [False, False, True]  # truncated
    assert sample.score().reward == 0.75


@needs("textarena")
def test_textarena_makes_a_game_that_can_be_won():
    run = settings("textarena:make", env_id="GuessTheNumber-v0")

    sample, source = try_environment(run)

    assert "Guess The Number" in sample.prompt
    low, high = 1, 20
    for _ in range(10):
        guess = (low + high) // 2
        step = sample.step(f"[{guess}]")
        if step.done:
            break
        assert step.observation.count("Enter your guess") == 0  # what was said is not repeated
        hint = re.findall("higher|lower", str(step.observation))[-1]
        low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
    assert sample.score().reward == 1.0
    again = source.make().begin(0, 5, held_out=False)
    assert again.step(f"[{guess}]").done


@needs("trl")
def test_tools_are_those_that_trl_would_take():
    """The lines of TRL that look for them, on a class with all kinds of members."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    assert "inspect.getmembers(type(instance), predicate=inspect.isfunction)" in source
    assert 'elif member_name == "get_reward":' in source

    class Kinds:
        limit = 3

        def reset(self, **row: Any) -> str:
            return "x"

        def look(self) -> str:
            """Look."""
            return "y"

        async def wait(self, seconds: float) -> str:
            """Wait.

            Args:
                seconds: How long.
            """
            return "z"

        def get_reward(self) -> float:
            return 1.0

        @property
        def state(self) -> str:
            raise AssertionError

        def _hidden(self) -> None: ...

    tools = Tools.from_instance(Kinds(), setting="run.environment")

    assert (tools.names, tools.is_async, tools.has_reward) == (("look", "wait"), True, True)
