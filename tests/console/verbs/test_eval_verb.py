"""`nyala eval`: held-out questions, answered without training."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
from typer.testing import CliRunner

from actors.environments.registry import make_environment
from configs.loader import load
from console.main import app
from learner.data.curriculum import eval_task
from tests.learner.support.tiny_policy import save_tiny_model

SETTINGS = """
run:
  directory: FOLDER/runs
  model: init
  environment: calculator
  eval_episodes: 12
  max_prompt_tokens: 32
  max_completion_tokens: 8
actors: {engine: torch}
"""
REWARD = """
def odd(output, prompt):
    return float(sum(prompt.encode()) % 2)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SETTINGS.replace("FOLDER", str(tmp_path)))
    return path


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.stdout if not code else " ".join(done.output.split())


def test_a_model_is_asked_the_questions_of_the_runs_evaluations(config: Path) -> None:
    model = config.with_name("model")
    save_tiny_model(model)
    rewards = config.with_name("rewards.py")
    rewards.write_text(REWARD)
    own = load(config).run
    environment = make_environment(own)
    specs = [eval_task(own, number, number) for number in range(12)]
    prompts = [
        str(environment.begin(each.index, each.seed, held_out=True).prompt) for each in specs
    ]
    expected = [float(sum(prompt.encode()) % 2) for prompt in prompts]
    assert len(set(expected)) == 2

    found = json.loads(run(model, config, "--set", f"run.reward={rewards}:odd", "--json"))

    assert found == {
        "model": str(model),
        "metric": "reward",
        "score": pytest.approx(fmean(expected)),
        "standard_error": pytest.approx(stdev(expected) / 12**0.5),
        "n": 12,
        "reward": pytest.approx(fmean(expected)),
    }
    assert f"{model}: held-out accuracy 0.000 (standard error 0.000), 12 questions" in run(
        model, config
    )


def test_each_question_is_a_group_and_all_parts_have_their_weights(config: Path) -> None:
    model = config.with_name("model")
    save_tiny_model(model)
    rewards = config.with_name("rewards.py")
    body = "return [1 / len(completions) for _ in completions]"
    rewards.write_text(f"def share(completions, **_): {body}\nshare.whole_groups = True\n")
    flags = ("--set", f"run.reward={rewards}:share", "--set", "rewards.weights.share=2")

    found = json.loads(
        run(model, config, *flags, "--set", "rewards.weights.environment=1", "--json")
    )

    assert found["reward"] == 2.0, "the answers of an untrained model are wrong"


def test_each_environment_of_several_has_its_figures(config: Path) -> None:
    model = config.with_name("model")
    save_tiny_model(model)
    several = """environments:
    - {name: small, environment: calculator, eval_episodes: 2}
    - {name: large, environment: calculator, share: 0, eval_episodes: 3}"""
    config.write_text(config.read_text().replace("environment: calculator", several))

    found = json.loads(run(model, config, "--json"))

    assert found["n"] == 5
    assert {name: each["n"] for name, each in found["environments"].items()} == {
        "small": 2,
        "large": 3,
    }


def test_what_cannot_be_evaluated_is_refused(config: Path) -> None:
    model = config.with_name("nothing")
    model.mkdir()

    assert "config.json" in run(model, config, code=2)
    assert "--checkpoint must be of a run" in run(model, config, "--checkpoint", "best", code=2)
    assert "got 0; add --set run.eval_episodes=64" in run(
        model, config, "--set", "run.eval_episodes=0", code=2
    )
