"""`nyala env test`: episodes of an environment, printed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from console.main import app
from tests.learner.support.tiny_policy import save_tiny_model

SETTINGS = """
run:
  directory: FOLDER/runs
  model: init
  environment: calculator
  max_prompt_tokens: 32
  max_completion_tokens: 24
actors: {engine: torch}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SETTINGS.replace("FOLDER", str(tmp_path)))
    return path


def run(config: Path, *arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["env", "test", str(config), *arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("verb", [["env", "test"], ["eval"]])
def test_live_agents_are_refused_with_what_to_do_instead(config: Path, verb: list[str]) -> None:
    rows = config.with_name("rows.jsonl")
    rows.write_text('{"task": "swap"}\n')
    where = f"run.environment_settings={{path: {rows}, prompt: task}}"

    done = CliRunner().invoke(
        app, [*verb, str(config), "--set", "run.environment=agent", "--set", where]
    )

    assert done.exit_code == 2
    assert "train a few batches" in done.output


def test_a_script_and_an_echo_need_no_model(config: Path) -> None:
    shown = run(config, "-n", "2", "--policy", "script", "--policy", "echo").splitlines()

    assert [line for line in shown if line.startswith(("script", "echo"))] == [
        "script, item 0: reward 1.000, ended by stop",
        "script, item 1: reward 1.000, ended by stop",
        "echo, item 0: reward 0.000, ended by stop",
        "echo, item 1: reward 0.000, ended by stop",
    ]
    assert sum(line.startswith("  environment ") for line in shown) == 2


def test_reward_functions_judge_what_was_played(config: Path) -> None:
    rewards = config.with_name("rewards.py")
    rewards.write_text("def short(completion):\n    return 1 / len(completion)\n")
    arguments = ("--set", f"run.reward={rewards}:short", "--policy", "echo", "-n", "1", "--json")

    (played,) = json.loads(run(config, *arguments))

    assert played["functions"] == {"short": 1 / len(played["prompt"])}
    assert played["reward"] == played["functions"]["short"]


RANKING = """
def rank(completions, **_):
    order = sorted(range(len(completions)), key=lambda row: len(completions[row]))
    return [order.index(row) / 10 + len(completions) for row in range(len(completions))]
rank.whole_groups = True
"""


def test_a_reward_of_whole_groups_gets_the_episodes_of_one_item_at_a_time(config: Path) -> None:
    rewards = config.with_name("rewards.py")
    rewards.write_text(RANKING)
    arguments = ("--set", f"run.reward={rewards}:rank", "--policy", "script", "--policy", "echo")

    played = json.loads(run(config, *arguments, "-n", "3", "--json"))

    assert sorted(each["reward"] for each in played) == [2.0, 2.0, 2.0, 2.1, 2.1, 2.1]


def test_what_is_shown_as_the_reward_is_weighed_as_in_the_run(config: Path) -> None:
    weights = ("--set", "rewards.weights.exact=0.25")

    shown = run(config, "-n", "1", "--policy", "script", *weights)

    assert "script, item 0: reward 0.250, ended by stop" in shown


def test_a_reward_that_fails_is_shown_beside_its_episode(config: Path) -> None:
    rewards = config.with_name("rewards.py")
    rewards.write_text("def broken(completion):\n    return 1 / 0\n")

    shown = run(config, "--set", f"run.reward={rewards}:broken", "--policy", "echo", "-n", "1")

    assert "echo, item 0: no reward: reward raised ZeroDivisionError" in shown


def test_each_environment_of_several_is_played_under_its_name(config: Path) -> None:
    text = config.read_text()
    several = """environments:
    - {name: small, environment: calculator, environment_settings: {max_operand: 2}}
    - {name: large, environment: calculator, share: 0}"""
    config.write_text(text.replace("environment: calculator", several))

    shown = run(config, "-n", "1", "--policy", "script").splitlines()

    assert [line for line in shown if line.startswith("script")] == [
        "script, item 0 of small: reward 1.000, ended by stop",
        "script, item 0 of large: reward 1.000, ended by stop",
    ]


def test_a_model_that_is_not_made_yet_is_named(config: Path) -> None:
    assert "make it with `nyala init-model`" in run(config, code=2)


@pytest.mark.slow
def test_the_model_plays_and_its_trained_tokens_are_shown(config: Path) -> None:
    model = config.with_name("model")
    save_tiny_model(model)

    played = json.loads(
        run(config, "--set", f"run.model={model}", "--policy", "model", "-n", "3", "--json")
    )

    assert [each["policy"] for each in played] == ["model"] * 3
    assert all(each["pieces"][0]["trained"] for each in played)


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_refused_before_an_engine_is_made(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = config.with_name("model")
    save_tiny_model(model)
    monkeypatch.setattr("console.verbs.env.make_engine", None)
    arguments = ("--set", f"run.model={model}", "--set", "run.max_prompt_tokens=1")

    shown = run(config, *arguments, "--policy", "model", code=2)

    assert "prompt must be at most run.max_prompt_tokens = 1, got" in shown


@pytest.mark.slow
def test_a_model_that_takes_too_long_is_a_refusal(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def never_loaded(_settings: object) -> AsyncIterator[None]:
        await asyncio.sleep(600)
        yield

    model = config.with_name("model")
    save_tiny_model(model)
    monkeypatch.setattr("console.verbs.env.started_model", never_loaded)
    monkeypatch.setattr("console.verbs.env.LONGEST_S", 0.01)

    shown = run(config, "--set", f"run.model={model}", "--policy", "model", code=2)

    assert "must end within 0.01 s, got some unfinished; play fewer with -n" in shown


@pytest.mark.slow
def test_stdout_has_the_episodes_alone_and_the_prompt_as_the_model_sees_it(config: Path) -> None:
    model = config.with_name("model")
    save_tiny_model(model)
    template = "{% for m in messages %}={{ m['content'] }}={% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    rewards = config.with_name("rewards.py")
    rewards.write_text("print('imported')\ndef loud(completion):\n    return 1.0\n")
    arguments = ["--set", f"run.model={model}", "--set", f"run.reward={rewards}:loud"]
    source = config.with_name("env.py")
    source.write_text(
        "import os\n"
        "from actors.environments.calculator import Calculator\n"
        "class Loud(Calculator):\n"
        "    def begin(self, index, seed, *, held_out):\n"
        "        print('printed')\n"
        "        os.write(1, b'written')\n"
        "        return super().begin(index, seed, held_out=held_out)\n"
    )
    arguments += ["--set", f"run.environment={source}:Loud", "--policy", "model", "-n", "1"]
    command = [sys.executable, "-c", "from console.main import app; app()", "env", "test"]

    done = subprocess.run(
        [*command, str(config), *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    (played,) = json.loads(done.stdout)
    assert played["prompt"].startswith("=")
    assert played["prompt"].endswith("=")
    assert "printed" in done.stderr


def test_an_environment_in_a_python_of_its_own_is_played(config: Path) -> None:
    source = config.with_name("env.py")
    source.write_text(
        "class Count:\n"
        "    def reset(self, seed=None):\n"
        "        print('printed')\n"
        "        return '1, 2?'\n"
        "    def step(self, action):\n"
        "        return '', float(action == '1, 2?'), True, {}\n"
    )
    own = ["--set", f"run.environment_python={sys.executable}"]
    own += ["--set", f"run.environment={source}:Count"]

    assert "echo, item 0: reward 1.000" in run(config, *own, "--policy", "echo", "-n", "1")


def test_warnings_of_an_engine_are_as_quiet_as_in_an_actor(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.NOTSET)

    run(config, "--policy", "script", "-n", "1")

    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert not logging.getLogger("vllm.engine").isEnabledFor(logging.WARNING)
