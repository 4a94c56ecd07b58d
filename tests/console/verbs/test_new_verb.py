"""`nyala new`: the files of a new project work as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from console.main import app

ROOT = Path(__file__).parents[3]
GUESS = (
    "run.environment=env.py:Guess",
    "run.environment_settings={}",
    "run.reward=null",
    "learner.warm_start_echo=0",
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "mine"])
    assert done.exit_code == 0, done.output
    assert "nyala up mine.yaml --dry-run" in done.output
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def test_its_settings_pass_every_check_with_either_environment(project: Path) -> None:
    for changes in ((), GUESS):
        overrides = [word for change in changes for word in ("--set", change)]
        done = CliRunner().invoke(app, ["up", "mine.yaml", "--dry-run", *overrides])
        assert done.exit_code == 0, done.output
        assert "would start in" in done.output


@pytest.mark.slow
def test_its_own_tests_pass_and_can_fail(project: Path) -> None:
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
