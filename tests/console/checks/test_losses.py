"""`nyala up`, `doctor` and `losses` check a loss of the user before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.errors import SettingsError
from configs.settings import Settings
from console.doctor.implied import settings_checks
from console.main import app
from console.run.checks.loss import check_losses
from tests.learner.support.user_losses import write_functions

SOURCE = '''
def plain(terms, settings):
    """Weigh the policy gradient with the ratio.

    Formula:
        S = r A
    """
    never_N = torch.zeros_like(terms.log_ratios_N, dtype=torch.bool)
    ratios_N = terms.log_ratios_N.exp()
    power = settings.parameters.get("power", 1)
    return Objective(ratios_N**power * terms.advantages_N, lambda: (never_N, never_N))


def turned(terms, settings):
    objective = plain(terms, settings)
    return Objective(-objective.values_N, objective.outside)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(write_functions(tmp_path / "mine.py", SOURCE))


def _settings(**algorithm: Any) -> Settings:
    return Settings.model_validate({"run": {"model": "init"}, "algorithm": algorithm})


def test_a_start_names_the_functions_of_the_user(file: str) -> None:
    assert check_losses(_settings()) == "of Nyala"
    surrogate = f"{file}:plain"
    assert check_losses(_settings(surrogate=surrogate)) == f"algorithm.surrogate {surrogate}"


def test_a_start_is_refused_for_a_wrong_function_under_the_settings(file: str) -> None:
    with pytest.raises(SettingsError, match="sign is turned"):
        check_losses(_settings(surrogate=f"{file}:turned"))
    with pytest.raises(SettingsError, match="pi/mu counts twice"):
        check_losses(_settings(surrogate=f"{file}:plain", parameters={"power": 2}))


def test_the_doctor_has_a_line_for_the_loss(file: str) -> None:
    checks = settings_checks(_settings(surrogate=f"{file}:turned"), Path("mine.yaml"))

    (check,) = [check for check in checks if check.name == "loss"]
    assert check.group == "learner"
    with pytest.raises(SettingsError, match="sign is turned"):
        check.look()


def test_a_function_is_checked_by_itself(file: str) -> None:
    def losses(*words: str) -> str:
        return CliRunner().invoke(app, ["losses", *words]).output

    shown = losses(f"{file}:plain", "--check", "surrogate")
    assert "Weigh the policy gradient with the ratio." in shown
    assert "S = r A" in shown
    assert shown.endswith("\nchecked: nothing is wrong\n")
    one, two = f"{file}:turned", f"{file}:plain"
    assert "sign is turned" in losses(one, "--check", "surrogate")
    twice = losses(two, "--check", "surrogate", "--set", "algorithm.parameters.power=2")
    assert "pi/mu counts twice" in twice
    for words in ((two,), (two, "--check", "loss"), ("tis", "--check", "correction")):
        assert "KIND being one of advantage, correction, surrogate" in losses(*words)
