"""What `play_verifiers.py` makes of episodes; `tests/system/agent_verifiers.py` plays real ones.

verifiers does not fit beside Nyala's packages, so episodes are objects with the same attributes.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace as Object
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "configs" / "agent" / "play_verifiers.py"


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "verifiers", Object(v1=Object()))
    monkeypatch.setitem(sys.modules, "verifiers.v1", Object())
    return lambda episode: runpy.run_path(str(PROGRAM))["outcome"](ENV, episode)


ENV = Object(complete=lambda episode: episode.ok)


def trace(*, trainable: bool = True, error: str = "", **scores: float | None) -> Object:
    rewards = {name: None if x is None else Object(value=0.5 * x) for name, x in scores.items()}
    errors = [Object(type="ProviderError", message=error)] if error else []
    return Object(agent=Object(trainable=trainable), errors=errors, rewards=rewards)


def episode(*traces: Object, ok: bool = True, error: str = "") -> Object:
    errors = [Object(type="EnvError", message=error)] if error else []
    return Object(traces=list(traces), ok=ok, errors=errors)


def test_weighted_rewards_are_parts_and_their_sum_is_the_reward(outcome):
    result = outcome(episode(trace(exact=1.0, form=0.5, late=None)))

    assert result == {"reward": 0.75, "parts": {"exact": 0.5, "form": 0.25}, "done": True}


def test_agents_that_are_trained_share_the_mean_and_others_count_nothing(outcome):
    traces = trace(exact=1.0), trace(exact=0.0), trace(trainable=False, exact=9.0)

    assert outcome(episode(*traces))["parts"] == {"exact": 0.25}


def test_an_episode_that_could_not_be_played_is_no_reward(outcome):
    assert outcome(episode(trace(error="no uv", exact=None), ok=False)) == {
        "error": "ProviderError: no uv"
    }
    assert outcome(episode(ok=False, error="no agent ran")) == {"error": "EnvError: no agent ran"}
    assert outcome(episode(trace(), ok=False)) == {"error": "its episode is not complete"}


def test_an_episode_that_the_environment_accepts_is_rewarded_in_spite_of_errors(outcome):
    assert outcome(episode(trace(error="retried", exact=1.0)))["reward"] == 0.5


def test_an_episode_that_ran_out_of_room_has_the_rewards_that_it_has_got(outcome):
    text = "the prompt must fit (context_length_exceeded)"

    result = outcome(episode(trace(error=text, exact=1.0, late=None), ok=False))

    assert result == {"reward": 0.5, "parts": {"exact": 0.5}, "done": True}


def test_what_one_episode_raises_ends_its_own_conversation_alone(monkeypatch):
    told = {"url": "http://door/conversations/1/v1", "key": "k", "task": {"task": {}}}
    posted = []

    class Door:
        async def post(self, url: str, *, cast_to: Any, body: dict[str, Any]) -> None:
            posted.append((url, body))

    monkeypatch.setitem(sys.modules, "verifiers", Object(v1=Object()))
    monkeypatch.setitem(sys.modules, "verifiers.v1", Object())
    converse = runpy.run_path(str(PROGRAM))["converse"]
    converse.__globals__["DOOR"] = Object(with_options=lambda **_: Door())

    asyncio.run(converse(Object(taskset=7), {}, told))

    ((url, body),) = posted
    assert url == "http://door/conversations/1/reward"
    assert "task_type" in body["error"]
