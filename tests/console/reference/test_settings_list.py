"""docs/settings.md and `nyala settings` have every setting, with when to change it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.settings import Settings
from console.main import app
from console.verbs.settings_list import as_markdown, settings

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_written_from_the_settings() -> None:
    is_same = PAGE.read_text(encoding="utf-8") == as_markdown()

    assert is_same, "write it again: .venv/bin/nyala settings --markdown > docs/settings.md"


def test_every_setting_says_when_to_change_it() -> None:
    # Those of one environment are as those of `run`, and refer to them.
    without = [s.name for s in settings() if not s.when and not s.meaning.startswith("As `run.")]

    assert without == [], "end the text below it with a paragraph such as: Raise it when ..."


def test_every_key_of_every_table_is_listed() -> None:
    listed = {each.name for each in settings()}
    of_tables = {
        f"{table}.{key}"
        for table, field in Settings.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    }

    assert of_tables - listed == {"run.samples", "run.tracing"}
    assert {"run.samples.every", "run.environments[].share"} <= listed


@pytest.mark.parametrize(
    ("name", "unit", "values", "default"),
    [
        ("broker.lease_timeout_s", "s", "a number > 0", "15.0"),
        ("run.max_policy_lag", "batches", "a whole number >= 0", "2"),
        ("run.groups_per_batch", "groups", "a whole number >= 1", "16"),
        ("run.head_dtype", "", "float32 or null", "null"),
        ("learner.offload", "", "a list, each one of parameters, activations", "[]"),
        ("run.model", "", "text", "none: give it"),
        ("run.stop", "", "a list, each text", "[]"),
    ],
)
def test_unit_values_and_default_are_the_settings_own(
    name: str, unit: str, values: str, default: str
) -> None:
    (found,) = [each for each in settings() if each.name == name]

    assert (found.unit, found.values, found.default) == (unit, values, default)


@pytest.mark.parametrize(
    ("asked", "shown", "hidden"),
    [
        ("learner.lr", "learner.lr  (default 1e-06; a number > 0)", "learner.lr_decay"),
        ("broker", "broker.keys", "run.model"),
        ("timeout", "run.reward_timeout_s", "broker.keys"),
    ],
)
def test_a_setting_a_table_or_part_of_a_name_can_be_asked_for(
    asked: str, shown: str, hidden: str
) -> None:
    done = CliRunner().invoke(app, ["settings", asked])

    assert done.exit_code == 0
    assert shown in done.output
    assert hidden not in done.output


def test_a_name_of_another_project_is_answered_with_ours() -> None:
    done = CliRunner().invoke(app, ["settings", "trainer.optim.lr"])

    assert done.exit_code == 2
    assert "trainer.optim.lr is not a setting; did you mean learner.lr?" in done.output
