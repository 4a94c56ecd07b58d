"""Environments of every kind through the ring, and some that are learnt, with real vLLM.

Run beside CI, `pytest tests/system/environments.py`: a whole run for each.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from console.main import app
from tests.actors.support.judge_server import JudgeServer
from tests.system.support.classes_of_users import GUESS, NUMPY, OLDER, SHOP
from tests.system.support.live_run import REPOSITORY, LiveRun, assert_nothing_lost_or_repeated
from tests.system.support.models_that_answer import (
    model_that_calls,
    model_that_says,
    write_rows,
)

LONGEST_S = 1200.0
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(2 * LONGEST_S),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]

STEPS = 3
FEW_STEPS = (
    f"run.steps={STEPS}",
    "run.max_prompt_tokens=2048",
    "run.max_completion_tokens=64",
    "learner.warm_start_steps=0",
)

FULL_QUESTIONS = {
    "algebra": ("simple_equations", "polynomial_equations"),
    "algorithmic": ("string_manipulation", "spiral_matrix"),
    "arithmetic": ("leg_counting", "fraction_simplification"),
    "cognition": ("number_sequence", "needle_haystack"),
    "graphs": ("family_relationships", "shortest_path"),
    "logic": ("propositional_logic", "knights_knaves"),
}
"""Datasets of reasoning-gym by category; the whole question is asked."""

COMPACT = {"prompt_style": "compact", "dense": True}
LEARNING: dict[str, dict[str, object]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
    "number_sorting": {
        "min_numbers": 3,
        "max_numbers": 4,
        "min_value": 0,
        "max_value": 9,
        "max_decimals": 0,
    },
    "word_sorting": {"min_words": 2, "max_words": 2, "min_word_length": 3, "max_word_length": 4},
    "caesar_cipher": {
        "delimiter": " ",
        "min_words": 1,
        "max_words": 1,
        "min_rotation": 3,
        "max_rotation": 3,
    },
}
"""Settings of datasets that the small model of the demo learns in minutes."""
LEARNT_IN = {"word_sorting": 150}  # batches; the others in 60
ROOMY = ("run.max_prompt_tokens=32", "run.max_completion_tokens=32")  # words of 14 letters
MORE_ANSWERS = 0.15


@pytest.mark.parametrize("dataset", [name for names in FULL_QUESTIONS.values() for name in names])
def test_a_dataset_of_reasoning_gym_goes_through(tmp_path: Path, dataset: str) -> None:
    longer = "run.max_prompt_tokens=4096"  # needle_haystack asks in 3,133 characters
    _finish(LiveRun(tmp_path, "tiny.yaml", *FEW_STEPS, longer, *_settings(dataset=dataset)))


def test_rows_of_a_file_go_through(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", *({"ask": f"{n}+1=", "sum": n + 1} for n in range(99))
    )
    settings = _settings(path=rows, prompt="ask", answer="sum", scorer="numeric")

    _finish(LiveRun(tmp_path, "tiny.yaml", *FEW_STEPS, "run.environment=dataset", *settings))


def test_a_game_with_gymnasiums_methods_goes_through(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(GUESS)
    run = LiveRun(
        tmp_path,
        "tiny.yaml",
        *FEW_STEPS,
        f"run.environment={tmp_path}/env.py:GuessingGame",
        *_settings(),
    )

    _finish(run)

    assert _has_observations(run)


def test_a_game_with_an_older_numpy_goes_through_and_may_die_once(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(OLDER)
    run = LiveRun(
        tmp_path,
        "tiny.yaml",
        *FEW_STEPS,
        f"run.environment={tmp_path}/env.py:Older",
        f"run.environment_requirements={json.dumps([NUMPY])}",
        *_settings(died=f"{tmp_path}/died"),
    )

    _finish(run)

    assert (tmp_path / "died").exists()
    assert _has_observations(run)
    assert all(line["reward_mean"] > 0 for line in run.lines("metrics"))


def test_a_game_of_textarena_goes_through(tmp_path: Path) -> None:
    run = LiveRun(
        tmp_path,
        "tiny.yaml",
        *FEW_STEPS,
        "run.max_completion_tokens=768",
        "run.environment=textarena:make",
        'run.environment_requirements=["textarena>=0.7"]',
        *_settings(env_id="GuessTheNumber-v0"),
    )

    _finish(run)

    assert _has_observations(run)


def test_a_class_with_tools_goes_through(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(SHOP)
    asked = [f"Pay all, {n}." for n in range(10, 100)]
    rows = write_rows(tmp_path / "rows.jsonl", *({"ask": each, "budget": 5} for each in asked))
    model = model_that_calls(tmp_path, asked, of=file, answer="0 left")
    settings = _settings(path=rows, prompt="ask", factory=f"{tmp_path}/env.py:Shop")
    run = LiveRun(
        tmp_path,
        "tiny.yaml",
        *FEW_STEPS,
        "run.environment=dataset",
        f"run.model={model}",
        "run.max_completion_tokens=128",
        *settings,
    )

    _finish(run)

    assert _has_observations(run)
    assert any(line["reward_mean"] > 0 for line in run.lines("metrics"))


def test_programs_are_run(tmp_path: Path) -> None:
    program = "```python\ndef f(x):\n return x*x\n```"
    tests = ({"ask": f"{n}:", "test": f"assert f({n}) == {n * n}"} for n in range(100, 200))
    rows = write_rows(tmp_path / "rows.jsonl", *tests)
    model = model_that_says(tmp_path, [f"{n}:" for n in range(100, 200)], (program, True))
    settings = _settings(
        path=rows, prompt="ask", answer="test", scorer="code", answer_format="", time_limit_s=2
    )
    run = LiveRun(
        tmp_path,
        "tiny.yaml",
        *FEW_STEPS,
        "run.environment=dataset",
        f"run.model={model}",
        *settings,
    )

    summary = _finish(run)

    assert summary["held_out_accuracy_before"] > 0.5


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    """A stand-in for a language model: it scores by length."""
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_judge_goes_through(
    tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "rubric.txt").write_text("Judge this.\nANSWER: {completion}")
    (tmp_path / "judge.py").write_text(
        "from actors.rewards.judge import Judge\n"
        f"helpful = Judge(url={judge.url!r}, model='m', rubric={str(tmp_path / 'rubric.txt')!r})\n"
    )

    reward = f"run.reward={tmp_path}/judge.py:helpful"

    _finish(LiveRun(tmp_path, "tiny.yaml", *FEW_STEPS, "run.max_completion_tokens=8", reward))

    assert judge.letters


def test_several_environments_go_through_with_vllm(tmp_path: Path) -> None:
    words = {"dataset": "spell_backward", **COMPACT, **LEARNING["spell_backward"]}
    sums, exam = (
        write_rows(tmp_path / f"{k}.jsonl", *({"q": f"{n}+{k}=", "a": n + k} for n in range(99)))
        for k in (1, 2)
    )
    rows = {"prompt": "q", "answer": "a", "scorer": "numeric", "answer_format": ""}
    exam_settings = {"path": exam, "held_out": exam, **rows}
    environments = [
        {
            "name": "words",
            "environment": "reasoning_gym",
            "environment_settings": words,
            "share": 3,
            "eval_episodes": 16,
        },
        {"name": "sums", "environment": "dataset", "environment_settings": {"path": sums, **rows}},
        {
            "name": "exam",
            "environment": "dataset",
            "environment_settings": exam_settings,
            "share": 0,
        },
    ]
    preset = yaml.safe_load((REPOSITORY / "configs" / "demo.yaml").read_text())
    del preset["run"]["environment_settings"]
    preset["run"] |= {"environments": environments, "steps": 2 * STEPS, "eval_episodes": 8}
    preset["run"] |= {"eval_every": STEPS, "group_size": 4, "name": "several"}
    preset["learner"] |= {"warm_start_steps": 0, "warm_start_echo": 0}
    preset["actors"]["count"] = 1
    (tmp_path / "several.yaml").write_text(yaml.safe_dump(preset))
    run = LiveRun(tmp_path, str(tmp_path / "several.yaml"))

    summary = _finish(run, steps=2 * STEPS)

    groups = Counter[str]()
    for line in run.lines("metrics"):
        own = line["environments"]
        assert sum(each["episodes"] for each in own.values()) == line["episodes"]
        groups.update({name: each["groups"] for name, each in own.items()})
    assert groups.keys() == {"words", "sums"}
    assert groups["words"] / groups.total() == pytest.approx(0.75, abs=0.1)
    for line in run.lines("eval"):
        counted = {name: each["episodes"] for name, each in line["environments"].items()}
        assert counted == {"words": 16, "sums": 8, "exam": 8}
    assert len(run.lines("eval")) == 3
    assert summary["held_out_accuracy_by_environment"].keys() == {"words", "sums", "exam"}


@pytest.mark.parametrize("dataset", LEARNING)
def test_a_dataset_is_learnt_with_vllm(tmp_path: Path, dataset: str) -> None:
    settings = _settings(dataset=dataset, **COMPACT, **LEARNING[dataset])
    steps = f"run.steps={LEARNT_IN.get(dataset, 60)}"
    shorter = (steps, "run.eval_every=20", "learner.lr=4e-4", "actors.count=1")

    _learn(LiveRun(tmp_path, "demo.yaml", *settings, *shorter, *ROOMY))


def test_a_new_project_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["new", "fresh"]).exit_code == 0
    (tmp_path / "runs").mkdir()

    project = tmp_path / "fresh"
    _learn(LiveRun(tmp_path / "runs", str(project / "fresh.yaml"), cwd=project))


def _learn(run: LiveRun) -> None:
    with run.up() as process:
        summary = run.finish(process, within_s=LONGEST_S)
    before, after = summary["held_out_accuracy_before"], summary["held_out_accuracy_after"]
    print(f"{before} -> {after}")
    assert after - before >= MORE_ANSWERS


def _finish(run: LiveRun, *, steps: int = STEPS) -> dict[str, Any]:
    with run.up() as process:
        summary = run.finish(process, within_s=LONGEST_S)
    assert summary["steps"] == steps
    assert_nothing_lost_or_repeated(run, summary)
    return summary


def _has_observations(run: LiveRun) -> bool:
    """Whether an episode had a second turn: what the environment said is not trained."""
    return any(line["trained_tokens"] < line["completion_tokens"] for line in run.lines("metrics"))


def _settings(**settings: object) -> list[str]:
    return [f"run.environment_settings={json.dumps(settings)}"]
