"""Scorer `math-verify`: what is equal, and expressions that are never done with."""

from __future__ import annotations

from importlib import metadata

import pytest

from actors.environments.answer_worker import same_number
from actors.environments.dataset.scorers import Scorer, make_scorer
from configs.errors import SettingsError


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    pytest.importorskip("math_verify", reason="in the extra `math`")
    return _make()


def _make() -> Scorer:
    return make_scorer("math-verify", time_s=1, memory_mb=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("1/2", "<answer>\\frac{1}{2}</answer>", 1.0),
        ("\\frac{1}{2}", "So it is \\boxed{0.5}.", 1.0),
        ("50\\%", "<answer>1/2</answer>", 1.0),
        ("5", "\\boxed{5\\text{ cm}}", 1.0),
        ("\\{1,2,3\\}", "<answer>\\{3, 1, 2\\}</answer>", 1.0),
        ("[0,1)", "\\boxed{[0, 1)}", 1.0),
        ("[0,1)", "\\boxed{(0, 1)}", 0.0),
        ("2\\sqrt{2}", "<answer>$\\sqrt{8}$</answer>", 1.0),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", 1.0),
        ("x = 3", "<answer>3</answer>", 1.0),
        ("#### 1,234", "The answer is $1234$.", 1.0),
        ("\\$18", "<answer>18</answer>", 1.0),
        ("3", "<think>\\boxed{3}</think><answer>4</answer>", 0.0),
        ("3", "<think>it may be \\boxed{3}", None),
        ("3", "I do not know", None),
        ("1", "<answer>9^{9^{9^{9}}}</answer>", 0.0),
        # What the package itself misreads.
        ("4", "<answer>3=4</answer>", 0.0),
        ("4", "<answer>x = 4</answer>", 1.0),
        ("100000", "\\boxed{1e5}", 1.0),
        ("18", "<answer>18 eggs</answer>", 1.0),
        ("7/2", "<answer>3 1/2</answer>", 1.0),
        ("3/2", "<answer>3 1/2</answer>", 0.0),
    ],
)
def test_expressions_are_compared_by_their_value(
    scorer: Scorer, gold: str, text: str, score: float | None
) -> None:
    assert scorer(text, gold) == score


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("4", "3=4", False), ("4", "4 = 4.0", True), ("4", "x = 3 = 4", False),
        ("4", "x = 4", None),
        ("100000", "1e5", True), ("18", "18 eggs", True), ("3.5", "3 1/2", True),
        ("1.5", "3 1/2", False), ("50%", "0.5", None), ("1/3", "0.3333", False), ("x", "3", None),
    ],
)  # fmt: skip
def test_numbers_are_compared_before_the_package_could_misread_them(
    gold: str, answer: str, same: bool | None
) -> None:
    assert same_number(gold, answer) is same


def test_a_reference_that_is_nothing_is_refused(scorer: Scorer) -> None:
    with pytest.raises(ValueError, match="must be mathematics, got nothing"):
        scorer("", " ")


def test_without_the_package_or_with_an_old_one_the_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.8.1")
    with pytest.raises(SettingsError, match=r"must have math-verify >= 0.9, got 0.8.1; install"):
        _make()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SettingsError, match=r"got none; install the extra `math`: "):
        _make()
