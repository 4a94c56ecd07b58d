"""Rewards of a right and of an empty answer, by the environment and by functions of the user."""

from __future__ import annotations

import pytest

from configs.errors import NyalaError
from configs.settings import Settings
from console.run.checks.check import CheckWarning
from console.run.checks.reward import check_answers, check_stop
from console.run.preflight import doubts_about


def settings(folder, body=None, *, weights=None, **changes):
    run = {"model": "init", "environment": "calculator", **changes}
    if body is not None:
        path = folder / "reward.py"
        path.write_text(f"def score(completion, answer):\n    {body}\n")
        run["reward"] = f"{path}:score"
    return Settings.model_validate({"run": run, "rewards": {"weights": weights or {}}})


def test_a_right_answer_is_rewarded_more_by_the_environment(tmp_path):
    assert check_answers(settings(tmp_path)) == "calculator: right answer 1, empty answer 0"


def test_a_right_answer_is_rewarded_more_by_a_function(tmp_path):
    found = check_answers(settings(tmp_path, "return 2.0 * (completion == answer) - 1"))

    assert found == "calculator: right answer 1, empty answer -1"


@pytest.mark.parametrize(
    ("weights", "right", "empty"),
    [({"score": 0.1}, "0.2", "0.1"), ({"environment": 3, "score": 1}, "5", "1")],
)
def test_parts_of_a_reward_are_weighed_as_in_the_run(tmp_path, weights, right, empty):
    found = check_answers(
        settings(tmp_path, "return 1.0 + (completion == answer)", weights=weights)
    )

    assert found == f"calculator: right answer {right}, empty answer {empty}"


@pytest.mark.parametrize(
    ("body", "got"), [("return 0.5", "0.5 and 0.5"), ("return -len(completion)", "-")]
)
def test_a_reward_that_does_not_tell_them_apart_is_warned_of(tmp_path, body, got):
    found = check_answers(settings(tmp_path, body))

    assert isinstance(found, CheckWarning)
    assert f"for an empty one, got {got}" in found.text


def test_a_function_that_fails_for_an_empty_answer_fails(tmp_path):
    with pytest.raises(NyalaError, match="ValueError"):
        check_answers(settings(tmp_path, "return float(int(completion) > 0)"))


@pytest.mark.parametrize(
    ("string", "body", "got"),
    [
        ("*", None, "got '*', which cuts '[7*1]' down to '[7' and its reward from 1 to 0"),
        (
            "0",
            "return float(completion == answer)",
            "which cuts '0' down to '' and its reward from",
        ),
    ],
)
def test_a_stop_string_that_ends_a_right_answer_too_early_is_warned_of(tmp_path, string, body, got):
    found = check_stop(settings(tmp_path, body, stop=["x", string]))

    assert isinstance(found, CheckWarning)
    assert (
        "run.stop should have no string that ends a right answer of calculator too early"
        in found.text
    )
    assert got in found.text


@pytest.mark.parametrize(
    ("strings", "body"),
    [(["x"], None), (["0"], "return float(answer.startswith(completion))")],
)
def test_a_stop_string_that_costs_no_reward_is_fine(tmp_path, strings, body):
    assert check_stop(settings(tmp_path, body, stop=strings)) == "right answers stay right"
    assert check_stop(settings(tmp_path, body)) == "no strings"


def test_up_and_doctor_look_at_stop_strings(tmp_path):
    (doubt,) = [
        text
        for text in doubts_about(settings(tmp_path, stop=["*"]), redis_url=None)
        if "run.stop" in text
    ]

    assert "take it out, or choose a string that no answer needs" in doubt
