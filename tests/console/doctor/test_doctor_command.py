"""`nyala doctor` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from console.main import app

ROOT = Path(__file__).parents[3]
REWARD = "def score(completion, answer):\n    return 1 / 0\n"
MINE = """
run: {name: mine, model: init, environment: calculator, reward: 'rewards.py:score'}
broker: {endpoint: 'tcp://127.0.0.1:0'}
actors: {engine: torch}
"""


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_the_demo_is_found_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no run yet
    answer = doctor(ROOT / "configs" / "demo.yaml", "--json")
    found = json.loads(answer.stdout)

    assert answer.exit_code == 0, answer.output
    assert found["failed"] == 0
    groups = ["machine", "packages", "network", "Redis", "learner", "model", "data", "room"]
    assert list(dict.fromkeys(each["group"] for each in found["checks"])) == groups
    assert [each for each in found["checks"] if each["grade"] == "skipped"] == []


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


def test_each_fault_has_its_line_and_the_rest_is_checked(project):
    answer = doctor("mine.yaml", "--set", "buffer.url=redis://127.0.0.1:1/0")

    assert answer.exit_code == 1
    lines = answer.output.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith("  failed")]
    assert failed == ["answers", "reward"]
    assert "ZeroDivisionError" in answer.output
    assert "cannot be reached" in answer.output
    skipped = [line.split()[1] for line in lines if line.startswith("  skipped")]
    expected = [
        *("version", "eviction", "durability", "memory", "prompts", "weights", "stop", "rows"),
        "answers",
    ]
    assert skipped == expected
    assert "Traceback" not in answer.output
    assert lines[-1].endswith("2 failed, 9 skipped")
    assert not (project / "runs").exists()  # nothing was begun


def test_settings_that_cannot_be_read_are_one_failure_beside_the_machine(project):
    (project / "mine.yaml").write_text("run: {steps: many}\n")

    answer = doctor("mine.yaml")

    assert answer.exit_code == 1
    assert "$.run.steps must be a whole number" in answer.output
    assert "shared memory" in answer.output
