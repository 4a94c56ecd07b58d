"""Settings without `--set` are refused as they would be written; everything else passes."""

from __future__ import annotations

import pytest

from configs.errors import SettingsError
from console.command_line import refuse_bare_settings

FLAGS = {"--set": True, "--method": True, "--dry-run": False, "--plain": False}


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("mine.yaml learner.lr=1e-4", "got learner.lr=1e-4; write --set learner.lr=1e-4"),
        ("mine.yaml --dry-run +learner.lr=1", "write --set learner.lr=1"),
        ("mine.yaml --learning_rate 1e-4", "got --learning_rate; write --set learner.lr=1e-4"),
        ("mine.yaml --num-generations=8", "write --set run.group_size=8"),
        ("mine.yaml --learning_rate", "write --set learner.lr=VALUE"),
    ],
)
def test_a_setting_without_set_is_repeated_as_it_is_written_here(typed, written):
    with pytest.raises(SettingsError) as refusal:
        refuse_bare_settings(typed.split(), FLAGS)

    assert written in str(refusal.value)


@pytest.mark.parametrize(
    "typed",
    ["mine.yaml --set learner.lr=1e-4 --plain", "a.b=c.yaml", "--method gspo", "--no-such-thing 3"],
)
def test_what_is_no_setting_passes(typed):
    refuse_bare_settings(typed.split(), FLAGS)
    refuse_bare_settings(["learner.lr=1"], {"--json": False})
