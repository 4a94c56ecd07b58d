"""Refused uses of a teacher, and the teachers of environments."""

from typing import Any

import pytest

from configs.settings import Settings

TWO = {
    "model": "m",
    "environments": [
        {"name": "sums", "environment": "calculator"},
        {"name": "words", "environment": "reasoning_gym"},
        {"name": "held", "environment": "calculator", "share": 0},
    ],
}


def settings(run: dict[str, Any] | None = None, **algorithm: Any) -> Settings:
    return Settings.model_validate({"run": run or {"model": "m"}, "algorithm": algorithm})


@pytest.mark.parametrize(
    ("run", "algorithm", "text"),
    [
        (
            None,
            {"teacher_prompt": "hint", "teacher_in": "actor"},
            r"teacher must be a model where algorithm\.teacher_in is actor, got null",
        ),
        (
            None,
            {"teacher": "t", "teacher_prompt": "hint", "teacher_in": "actor"},
            r"teacher_prompt must be null where algorithm\.teacher_in is actor",
        ),
        (
            None,
            {"advantage": "none"},
            r"teacher must be a model where algorithm\.advantage is none",
        ),
        (
            TWO,
            {"teacher": {"sums": "t", "word": "u"}},
            r"teacher must name environments of the run, sums, words, held, got word; correct",
        ),
        (TWO, {"teacher": {}}, r"teacher must name environments of the run, .* got none"),
        (
            TWO,
            {"teacher": {"sums": "t"}, "advantage": "none"},
            r"a model for each environment where algorithm\.advantage is none, got none for words,",
        ),
        (
            None,
            {"teacher": "t", "surrogate": "topr", "correction": "none", "advantage": "dr_grpo"},
            r"surrogate must not be topr with algorithm\.teacher, got topr",
        ),
        (
            None,
            {"teacher_prompt": "hint", "filter_zero_variance": True},
            r"filter_zero_variance must be false with algorithm\.teacher, got true",
        ),
    ],
)
def test_a_teacher_that_would_be_lost_or_wrong_is_refused(
    run: dict[str, Any] | None, algorithm: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        settings(run, **algorithm)


def test_an_environment_has_the_teacher_of_its_name() -> None:
    algorithm = settings(TWO, teacher={"words": "t", "sums": "u", "held": "t"}).algorithm

    assert algorithm.teachers == ("t", "u")
    assert [algorithm.teacher_of(name) for name in ("sums", "words", "held")] == [1, 0, 0]
    assert settings(TWO, teacher={"words": "t"}).algorithm.teacher_of("sums") is None


def test_a_prompt_alone_makes_the_initial_model_the_teacher() -> None:
    algorithm = settings(teacher_prompt="hint", advantage="none").algorithm

    assert (algorithm.teachers, algorithm.teacher_of("any")) == ((None,), 0)
    assert settings(teacher="t", teacher_prompt="hint").algorithm.teachers == ("t",)


def test_there_is_no_teacher_by_default() -> None:
    algorithm = settings().algorithm

    assert (algorithm.has_teacher, algorithm.teachers, algorithm.teacher_of("any")) == (
        False,
        (),
        None,
    )
