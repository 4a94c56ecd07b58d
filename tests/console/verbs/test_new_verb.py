"""`nyala new`: the files of a new project work as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.chat import read_prompt
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.registry import make_dataset
from configs.errors import EngineError
from configs.loader import load
from configs.settings import RunSettings, Settings
from console.main import app
from console.run.decoder_sizes import ModelShape
from console.verbs import new
from tests.learner.support.tiny_policy import save_tiny_model

ROOT = Path(__file__).parents[3]
GUESS = (
    "run.environment=env.py:GuessingGame",
    "run.environment_settings={}",
    "run.reward=null",
    "learner.warm_start_echo=0",
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "mine"])
    assert done.exit_code == 0, done.output
    assert "nyala up mine/mine.yaml --dry-run" in done.output
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def test_its_settings_pass_every_check_with_either_environment(project: Path) -> None:
    for changes in ((), GUESS):
        overrides = [word for change in changes for word in ("--set", change)]
        done = CliRunner().invoke(app, ["up", "mine.yaml", "--dry-run", *overrides])
        assert done.exit_code == 0, done.output
        assert "would start in" in done.output


@pytest.fixture(scope="session")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smallest"
    save_tiny_model(folder)
    return folder


def test_a_model_that_is_named_gets_limits_and_a_rate_of_its_own(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(smallest.parent)

    done = CliRunner().invoke(app, ["new", "own", "--model", "smallest"])

    assert done.exit_code == 0, done.output
    settings = load(smallest.parent / "own" / "own.yaml")
    monkeypatch.chdir(smallest.parent / "own")
    rows = [row for row, _ in make_dataset(settings.run).all_rows()]
    encode = ModelTokenizer.for_run(settings.run).encode_prompt
    longest = max(len(encode(read_prompt(row.prompt))) for row in rows)
    assert settings.run.model == str(smallest.resolve())
    assert settings.run.max_prompt_tokens - 32 < longest <= settings.run.max_prompt_tokens
    assert settings.learner.lr == 1e-5
    assert settings.learner.warm_start_steps == type(settings.learner)().warm_start_steps
    assert settings.run.max_completion_tokens >= 64
    assert settings.run.temperature == 1.0
    assert settings.run.eval_episodes == min(64, make_dataset(settings.run).counts[1])
    assert {row.answer.isdecimal() for row in rows if row.answer is not None} == {True}
    assert f"has {longest} in this" in (smallest.parent / "own" / "own.yaml").read_text()


def test_rows_that_are_named_give_columns_lengths_and_scorer_and_stay_where_they_are(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ({"problem": "count " * n, "solution": "word " * 60 + str(n)} for n in range(1, 200))
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = CliRunner().invoke(app, ["new", "own", "--model", str(smallest), "--data", "mine.jsonl"])

    assert done.exit_code == 0, done.output
    run = load(tmp_path / "own" / "own.yaml").run
    assert run.environment_settings == {
        "path": str(tmp_path / "mine.jsonl"),
        "prompt": "problem",
        "answer": "solution",
        "scorer": "numeric",
    }
    assert not (tmp_path / "own" / "data.jsonl").exists()
    assert run.max_prompt_tokens > 199
    assert run.max_completion_tokens > 120
    assert run.eval_episodes == make_dataset(run).counts[1] < 64


def test_rows_made_for_verl_have_their_answers_in_a_column(tmp_path: Path) -> None:
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 0},
    }
    (tmp_path / "verl.jsonl").write_text(json.dumps(row) + "\n")

    assert new.columns_of(tmp_path / "verl.jsonl") == {
        "path": str(tmp_path / "verl.jsonl"),
        "prompt": "prompt",
        "answer": "reward_model.ground_truth",
        "scorer": "numeric",
    }


def test_words_as_answers_are_compared_exactly(tmp_path: Path) -> None:
    (tmp_path / "words.csv").write_text("prompt,answer\ncapital of France?,Paris\n3 + 4?,7\n")

    assert new.columns_of(tmp_path / "words.csv")["scorer"] == "exact"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": "one"}\n', "a column of each question"),
        ('{"question": "one", "label": "1"}\n', "a column of each answer"),
        ('{"question": "one", "answer": "1"}\n', "add --model FOLDER"),
    ],
)
def test_rows_that_cannot_be_fitted_are_refused_and_leave_no_folder(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text(text)
    given = [] if "--model" in said else ["--model", str(smallest)]

    done = CliRunner().invoke(app, ["new", "own", *given, "--data", "mine.jsonl"])

    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not Path("own").exists()


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ({0.0: 0.4, 1.0: 0.2, 0.8: 0.3, 0.6: 0.4}, 1.0),
        ({0.0: 0.4, 1.0: 0.1, 0.8: 0.2, 0.6: 0.3}, 0.8),
        ({0.0: 0.4, 1.0: 0.0, 0.8: 0.1, 0.6: 0.1}, 0.6),
    ],
)
def test_the_highest_temperature_with_half_of_the_greedy_score_is_chosen(
    monkeypatch: pytest.MonkeyPatch, scores: dict[float, float], chosen: float
) -> None:
    async def found(*_: object) -> dict[float, float]:
        return dict(scores)

    monkeypatch.setattr(new, "scores_at", found)

    assert new.first_look(Settings(run=RunSettings(model="init")))[0] == chosen


def test_a_model_that_cannot_be_asked_keeps_the_usual_temperature(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    errors: list[Exception] = [EngineError("no such kind of model"), TimeoutError()]

    async def refused(*_: object) -> dict[float, float]:
        raise errors.pop(0)

    monkeypatch.setattr(new, "scores_at", refused)

    for why in ("no such kind of model", "they took longer than 300 s"):
        assert new.first_look(Settings(run=RunSettings(model="init"))) == (1.0, "")
        assert f"run.temperature stays 1.0: {why}" in capfd.readouterr().err


def test_rows_of_which_none_is_held_out_say_so_in_the_settings(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 2)

    done = CliRunner().invoke(app, ["new", "own", "--model", str(smallest), "--data", "two.jsonl"])

    assert done.exit_code == 0, done.output
    text = (tmp_path / "own" / "own.yaml").read_text()
    assert re.search(r"eval_episodes: 0 +# no row is held out: .* held_out: FILE", text)


def test_a_shared_card_has_larger_batches_and_a_cache_of_a_fixed_size(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new, "visible_gpus", lambda: ["0"])

    CliRunner().invoke(app, ["new", "own", "--model", str(smallest)])

    settings = load(tmp_path / "own" / "own.yaml")
    assert settings.run.dtype == "bfloat16"
    assert settings.run.group_size * settings.run.groups_per_batch == 512
    assert settings.actors.kv_cache_gib == 4
    assert settings.learner.broadcast is False


def test_the_rows_of_the_preset_are_those_of_a_new_project() -> None:
    train, held_out = (ROOT / "configs" / f"smollm2_{n}.jsonl" for n in ("train", "held_out"))

    assert train.read_text() + held_out.read_text() == new.problems(656)
    assert len(train.read_text().splitlines()) == 400


@pytest.mark.parametrize(("parameters", "rate"), [(135e6, "1e-5"), (0.6e9, "2e-6"), (8e9, "1e-6")])
def test_a_larger_model_has_a_lower_rate(
    smallest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: float,
    rate: str,
) -> None:
    monkeypatch.setattr(ModelShape, "parameters", property(lambda _: parameters))
    monkeypatch.chdir(tmp_path)

    CliRunner().invoke(app, ["new", "own", "--model", str(smallest)])

    assert f"\n  lr: {rate} " in (tmp_path / "own" / "own.yaml").read_text()


def test_init_is_no_model_to_fit_settings_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    for name, flags in (("named", ["--model", "init"]), ("none", [])):
        assert CliRunner().invoke(app, ["new", name, *flags]).exit_code == 0

    texts = [
        Path(name, f"{name}.yaml").read_text().replace(name, "x") for name in ("named", "none")
    ]
    assert texts[0] == texts[1]


def test_a_model_that_cannot_be_trained_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()

    done = CliRunner().invoke(app, ["new", "own", "--model", "model.gguf"])

    assert done.exit_code == 2
    assert "GGUF" in done.output
    assert not (tmp_path / "own").exists()


@pytest.mark.slow
def test_its_own_tests_pass_and_can_fail(project: Path) -> None:
    # As in a checkout of ours, whose settings an environment without its plugins does not take.
    outside = '[tool.pytest.ini_options]\naddopts = ["--strict-config"]\nunknown = 1\n'
    project.with_name("pyproject.toml").write_text(outside)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    # No bytecode: the second file is as long as the first, and may be of the same second.
    environment = os.environ | {
        "PYTHONPATH": f"{project}{os.pathsep}{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run() -> int:
        return subprocess.run(
            command, cwd=project, env=environment, check=False, capture_output=True, timeout=60
        ).returncode

    assert run() == 0
    rewards = project / "rewards.py"
    rewards.write_text(rewards.read_text().replace("right / max", "right / min"))
    assert run() == 1


@pytest.mark.parametrize("name", ["mine", "My Project", "../mine", ""])
def test_a_name_that_is_taken_or_no_name_is_refused(project: Path, name: str) -> None:
    (project / "mine").mkdir()
    done = CliRunner().invoke(app, ["new", name])

    assert done.exit_code == 2
    assert "must be" in done.output
