"""Exit codes of errors, by which `nyala up` decides about restarts."""

import re

import pytest

from configs import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.SettingsError, 2),
        (errors.RefusedError, 2),
        (errors.RewardError, 2),
        (errors.CheckpointError, 2),
        (errors.LostLineage, 3),
        (errors.StoreError, 1),
        (errors.DeadlineError, 1),
        (errors.EngineError, 1),
        (errors.EngineUnfit, 2),
        (errors.EngineDied, 4),
        (errors.EngineNotStarted, 5),
        (errors.WeightsError, 1),
        (errors.NyalaError, 1),
    ],
)
def test_a_process_is_started_again_only_if_that_may_help(kind, code):
    assert errors.exit_code(kind("why")) == code


def test_every_error_is_in_the_tree_at_the_top_of_the_module():
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.NyalaError)
    ]

    assert len(kinds) > 5
    for name in kinds:
        assert name in errors.__doc__


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ("Ben shares 81 pencils with each friend. " * 9, 80),
        ('it\'s "his" ' * 40, 60),
        (b"\xff" * 900, 60),
        (["a text of many words" * 9] * 9, 80),
        ({"question": "a text of many words" * 9}, 80),
        ([[["deep" * 99] * 99] * 99] * 99, 80),
        (10**400, 80),
    ],
    ids=["text", "both quotes", "bytes", "list", "map", "nested", "number"],
)
def test_a_value_that_is_cut_keeps_its_quotes_and_brackets(value: object, most: int) -> None:
    text = errors.quoted(value, most)

    assert "..." in text
    assert len(text) <= 2 * most
    assert re.sub(r"\\.", "", text).count("'") % 2 == 0
    ends = {"'": "'", "b": "'", "[": "]", "{": "}", "1": "0"}
    assert text[-1] == ends[text[0]]


def test_a_value_without_a_repr_is_named_by_its_type() -> None:
    looped: list[object] = []
    looped.append(looped)

    assert errors.quoted(10**9999) == "int"
    assert errors.quoted(looped).startswith("[[")
    assert errors.quoted("short") == "'short'"
