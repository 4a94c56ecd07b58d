"""Rewards of a right and of an empty answer, by the environment and by functions of the user."""

from __future__ import annotations

import pytest

from configs.errors import NyalaError
from configs.settings import Settings
from console.run.checks.check import Doubt
from console.run.checks.reward import check_answers


def settings(folder, body=None):
    run = {"model": "init", "environment": "calculator"}
    if body is not None:
        path = folder / "reward.py"
        path.write_text(f"def score(completion, answer):\n    {body}\n")
        run["reward"] = f"{path}:score"
    return Settings.model_validate({"run": run})


def test_a_right_answer_is_rewarded_more_by_the_environment(tmp_path):
    assert check_answers(settings(tmp_path)) == "calculator: right answer 1, empty answer 0"


def test_a_right_answer_is_rewarded_more_by_a_function(tmp_path):
    found = check_answers(settings(tmp_path, "return 2.0 * (completion == answer) - 1"))

    assert found == "calculator: right answer 1, empty answer -1"


@pytest.mark.parametrize(
    ("body", "got"), [("return 0.5", "0.5 and 0.5"), ("return -len(completion)", "-")]
)
def test_a_reward_that_does_not_tell_them_apart_is_warned_of(tmp_path, body, got):
    found = check_answers(settings(tmp_path, body))

    assert isinstance(found, Doubt)
    assert f"for an empty one, got {got}" in found.text


def test_a_function_that_fails_for_an_empty_answer_fails(tmp_path):
    with pytest.raises(NyalaError, match="ValueError"):
        check_answers(settings(tmp_path, "return float(int(completion) > 0)"))
