"""Classes whose methods are tools, as TRL's environment_factory takes them, and skyrl-gym's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from actors.environments import registry
from actors.environments.base import columns_of, tools_of
from actors.environments.calls import finish
from configs.errors import SettingsError
from configs.settings import RunSettings

CLASSES = '''
import asyncio
import random

class Account:
    def __init__(self, fee: int = 0):
        self.fee = fee
    def reset(self, start: int, **row) -> str:
        self.balance = start
        self.row = row
        return f" You have {start}."
    def pay(self, amount: int) -> str:
        """Pay an amount.

        Args:
            amount: How much.
        """
        self.balance -= amount + self.fee
        return f"balance {self.balance}"
    def get_reward(self) -> float:
        return 1.0 if self.balance == 0 else 0.0
    def _secret(self):
        raise AssertionError

class Slow(Account):
    async def pay(self, amount: int) -> str:
        """Pay an amount.

        Args:
            amount: How much.
        """
        await asyncio.sleep(0)
        return Account.pay(self, amount)

class Unscored:
    reset, pay = Account.reset, Account.pay
    fee = 0

class Untyped(Account):
    def pay(self, amount):
        return "?"

class NoTools:
    def reset(self, **row):
        return "x"

class Own:
    def reset(self, **row) -> str:
        self.secret = random.randint(1, 10**9)
        return f"Find {self.secret}."
    def find(self, number: int) -> str:
        """Find it.

        Args:
            number: What to find.
        """
        return str(number == self.secret)
    def get_reward(self) -> float:
        return 0.5

class Silent(Own):
    def reset(self, **row) -> None:
        pass

class Sky:
    def __init__(self, env_config=None, extras={}):
        self.right = extras["answer"]
        self.bonus = env_config.bonus
    def init(self, prompt):
        return prompt, {}
    def step(self, action):
        done = action == self.right
        observations = [] if done else [{"role": "user", "content": "no"}]
        return {"observations": observations, "reward": self.bonus, "done": done, "metadata": {}}
'''


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "env.py").write_text(CLASSES)
    rows = [{"question": f"Pay {n}.", "start": n, "answer": str(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def settings(factory: str, *, reward: str | None = None, **more: Any) -> RunSettings:
        given = {
            "path": str(tmp_path / "rows.jsonl"),
            "prompt": "question",
            "factory": f"{tmp_path}/env.py:{factory}",
        }
        return RunSettings(
            model="init", environment="dataset", environment_settings=given | more, reward=reward
        )

    return settings


def make_environment(run: RunSettings) -> Any:
    return registry.make_environment(run)


def try_environment(run: RunSettings) -> tuple[Any, Any]:
    return registry.try_environment(run)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_row_is_played_with_tools(make):
    conversation = make_environment(make("Account")).begin(0, 0, held_out=False)
    start = columns_of(conversation)["start"]

    assert conversation.prompt == f"Pay {start}. You have {start}."
    (schema,) = json.loads(tools_of(conversation))
    assert schema["function"]["name"] == "pay"
    assert schema["function"]["parameters"]["properties"]["amount"]["type"] == "integer"
    step = conversation.step(f"I pay. {call('pay', amount=start)}")
    assert (step.observation, step.done) == ([{"role": "tool", "content": "balance 0"}], False)
    assert conversation.step("Done.").done
    score = conversation.score()
    assert (score.reward, score.metrics) == (1.0, {"tool_calls": 1.0, "tool_failures": 0.0})


def test_the_policy_learns_what_went_wrong_with_a_call(make):
    conversation = make_environment(make("Account")).begin(0, 0, held_out=False)
    wrong = [call("_secret"), call("reset", start=0), call("pay", price=3), call("pay", amount="x")]

    step = conversation.step("".join(wrong))

    told = [message["content"] for message in step.observation]
    assert len(told) == 4
    assert all("error" in text for text in told)
    assert "no tool _secret" in told[0]
    assert "no tool reset" in told[1]
    assert conversation.score().metrics == {"tool_calls": 4.0, "tool_failures": 4.0}


def test_episodes_have_instances_of_their_own_and_settings(make):
    environment = make_environment(make("Account", factory_settings={"fee": 1}))
    first, second = (environment.begin(i, 0, held_out=False) for i in (0, 1))

    start = columns_of(first)["start"]
    assert first.step(call("pay", amount=0)).observation[0]["content"] == f"balance {start - 1}"
    start = columns_of(second)["start"]
    assert second.step(call("pay", amount=start)).observation[0]["content"] == "balance -1"
    first.score()
    assert environment.begin(2, 0, held_out=False)._instance is first._instance


def test_async_tools_are_awaited_in_the_event_loop(make):
    sample, source = try_environment(make("Slow"))
    start = columns_of(sample)["start"]

    assert source.is_async
    step = finish(sample.step(call("pay", amount=start)))
    assert step.observation == [{"role": "tool", "content": "balance 0"}]
    assert asyncio.run(sample.score()).reward == 1.0


def test_threads_share_the_rows_and_nothing_else(make):
    _, source = try_environment(make("Account"))
    first, second = source.make(), source.make()

    assert not source.is_shared
    assert first._rows is second._rows
    instances = [each.begin(0, 0, held_out=False)._instance for each in (first, second)]
    assert instances[0] is not instances[1]


def test_without_a_dataset_reset_returns_the_question(make):
    run = make("Own").model_copy(update={"environment_settings": {}})
    place = make("Own").environment_settings["factory"]
    sample, source = try_environment(run.model_copy(update={"environment": place}))
    again = source.make().begin(0, 3, held_out=False)
    other = source.make().begin(1, 3, held_out=False)

    (message,) = sample.prompt
    assert message["content"].startswith("Find ")
    assert again.prompt == sample.prompt
    assert other.prompt != sample.prompt


def test_a_row_without_get_reward_is_scored_by_its_answer_or_a_function(make):
    with pytest.raises(SettingsError, match="must have get_reward where nothing else"):
        make_environment(make("Unscored"))
    answered = make_environment(make("Unscored", answer="answer", answer_format=""))
    conversation = answered.begin(0, 0, held_out=False)
    conversation.step(f"It is {conversation.answer}.")

    assert conversation.score().parts == {"exact": 0.0}
    conversation.step(conversation.answer)
    assert conversation.score().parts == {"exact": 1.0}
    assert make_environment(make("Unscored", reward="rewards.py:f")) is not None


def test_a_skyrl_class_is_made_for_each_row(make):
    settings = {"factory_settings": {"bonus": 0.5}, "answer": "answer", "answer_format": ""}
    conversation = make_environment(make("Sky", **settings)).begin(0, 0, held_out=False)

    assert conversation.prompt[-1]["content"].startswith("Pay")
    step = conversation.step("?")
    assert (step.observation, step.done) == ([{"role": "user", "content": "no"}], False)
    assert conversation.step(conversation.answer).done
    assert conversation.score().reward == 1.0


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("Untyped", "must have tools with type hints and a docstring"),
        ("NoTools", "must be a class with reset and public methods that are tools"),
    ],
)
def test_a_class_without_proper_tools_is_refused(make, factory, words):
    with pytest.raises(SettingsError, match=f"environment_settings.factory {words}"):
        make_environment(make(factory))


def test_a_reset_without_a_question_is_refused(make):
    place = make("Silent").environment_settings["factory"]
    run = make("Silent").model_copy(update={"environment_settings": {}, "environment": place})

    with pytest.raises(SettingsError, match="must have a reset that returns the question"):
        try_environment(run)


def test_a_skyrl_class_needs_a_dataset(make, tmp_path):
    (tmp_path / "sky.py").write_text(
        "class Sky:\n    def init(self, prompt): pass\n    def step(self, action): pass\n"
    )
    run = RunSettings(model="init", environment=f"{tmp_path}/sky.py:Sky")

    with pytest.raises(SettingsError, match="must be dataset for a class with `init` and step"):
        make_environment(run)
