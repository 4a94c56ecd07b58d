"""`nyala sft`: from rows to a model, its report, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from configs.loader import load
from console.main import app
from console.report.record import read_run
from console.report.write import render
from tests.console.support.made_run import made_run
from tests.learner.support.tiny_policy import save_tiny_model
from tests.waiting import wait_until

ROWS = 20


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Settings with a tiny model and rows, one of which is longer than the context."""
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(ROWS)]
    rows.append({"prompt": "9+1=", "completion": "10" * 20})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "run": {
            "name": "taught",
            "directory": str(tmp_path / "runs"),
            "model": "model",
            "environment": "calculator",
            "max_prompt_tokens": 8,
            "max_completion_tokens": 8,
            "eval_every": 5,
        },
        "sft": {"data": "rows.jsonl", "held_out": 4, "epochs": 4, "batch": 6},
        "learner": {"lr": 1e-2, "device": "cpu", "checkpoint_every": 3},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run(verb: str, *arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [verb, *map(str, arguments)])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.slow
def test_rows_become_a_model_whose_report_a_later_run_shows(config: Path) -> None:
    said = run("sft", config, "--plain")

    taught = load(config).run.folder
    steps = -(-4 * (ROWS + 1 - 4) // 6)
    assert f"{ROWS + 1 - 4} rows to train on, 4 set aside" in said
    assert "run.max_completion_tokens = 16 tokens: 1 cut at the end, 0 left out" in said
    assert f"step {steps}/{steps}, loss" in said
    assert f"--set run.model={taught}/model" in said
    summary = json.loads((taught / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["held_out_log-likelihood_after"] > summary["held_out_log-likelihood_before"]
    assert "Supervised loss" in (taught / "report.html").read_text()

    assert "taught has finished" in run("sft", config)
    assert "$.sft.epochs was 4.0, got 5.0" in run("sft", config, "--set=sft.epochs=5", code=2)
    assert "a run of `nyala sft`; go on with" in run("up", config, "--set=run.steps=3", code=2)

    rewarded = made_run(config.with_name("rewarded"), model=str(taught / "model"))
    page = render([read_run(rewarded)])
    assert "Supervised start" in page
    assert page.index("Sampled reward") < page.index("Supervised loss")
    both = render([read_run(taught), read_run(rewarded)])
    assert both.count("Supervised loss") > page.count("Supervised loss")


@pytest.mark.slow
def test_a_stop_saves_and_the_command_that_is_printed_goes_on(config: Path) -> None:
    command = [sys.executable, "-c", "from console.main import app; app()", "sft", str(config)]
    many = ["--set", "sft.epochs=200", "--plain"]
    folder = load(config).run.folder
    metrics = folder / "metrics.jsonl"
    with subprocess.Popen([*command, *many], stdout=subprocess.PIPE, text=True) as child:
        try:
            wait_until(
                lambda: metrics.exists() and metrics.read_text().count("\n") > 5, timeout_s=180
            )
            child.send_signal(signal.SIGINT)
            said, _ = child.communicate(timeout=60)
        finally:
            child.kill()

    assert child.returncode == 130
    (newest,) = sorted(folder.glob("checkpoints/step-*"))[-1:]
    steps = len(metrics.read_text().splitlines())
    assert newest.name == f"step-{steps:06d}"
    assert f"to go on from {newest.name}:" in said
    assert f"sft {config} --set sft.epochs=200" in said


def test_a_wrong_row_is_named_and_nothing_is_left_to_go_on_with(config: Path) -> None:
    with config.with_name("rows.jsonl").open("a") as rows:
        rows.write('{"question": "9+1="}\n')

    said = run("sft", config, code=2)

    assert (
        f"line {ROWS + 2} of {config.with_name('rows.jsonl')}: a row must have `messages`" in said
    )
    assert not (load(config).run.folder / "config.yaml").exists()


def test_the_name_of_a_rewarded_run_is_refused(config: Path) -> None:
    made_run(load(config).run.folder)

    said = run("sft", config, code=2)

    assert "run.name must be of another run for supervised training, got taught" in said


def test_a_rate_that_is_far_from_usual_is_said(config: Path, monkeypatch) -> None:
    from console.run.checks import model as checks
    from console.verbs import sft

    monkeypatch.setattr(checks, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(sft.SupervisedSession, "run", lambda _: 0)

    assert "warning: learner.lr should be about" in run("sft", config, "--set=learner.lr=1e-9")
