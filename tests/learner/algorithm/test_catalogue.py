"""The catalogue behind `nyala losses` and docs/algorithms.md, against registries and settings."""

from __future__ import annotations

import pytest

from configs.loader import load
from configs.settings import AlgorithmSettings
from learner.algorithm.catalogue import CHOICES, entries
from learner.algorithm.methods import METHODS
from tests.learner.support.user_losses import our_names

ENTRIES = entries()


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.setting)
def test_every_name_that_a_setting_takes_is_described(choice):
    names = our_names(choice.setting.removeprefix("algorithm."))

    described = [entry.name for entry in ENTRIES if entry.setting == choice.setting]

    assert sorted(described) == sorted(names)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.setting}={entry.name}")
def test_every_name_has_a_summary_a_formula_and_its_use(entry):
    assert entry.summary.endswith(".")
    assert entry.formula
    assert entry.use.endswith(".")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_published_method_is_made_of_settings_that_agree(method, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("run: {model: init, max_policy_lag: 2}\n")

    given = ["algorithm.teacher=other/model"] if method.name == "OPD" else []
    settings = load(config, [*given, *(f"{key}={value}" for key, value in method.settings.items())])

    for key, value in method.settings.items():
        table, _, name = key.partition(".")
        found = getattr(getattr(settings, table), name)
        assert found == value
    assert method.note.endswith(".")
    assert method.source


def test_the_settings_that_a_name_reads_come_with_their_defaults():
    by_name = {entry.name: entry for entry in ENTRIES if entry.name != "dr_grpo"}

    assert by_name["tis"].defaults == {"algorithm.rho_bar": AlgorithmSettings().rho_bar}
    assert by_name["gspo"].defaults == {
        "algorithm.clip_low": 3e-4,  # of its own
        "algorithm.clip_high": 4e-4,
    }
    assert by_name["gae"].defaults.keys() == {"critic.gamma", "critic.lam"}
