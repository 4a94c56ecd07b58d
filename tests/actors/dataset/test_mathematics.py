"""Scorer `math-verify`: what is equal, and expressions that are never done with."""

from __future__ import annotations

import os
import signal
from importlib import metadata

import pytest

from actors.environments.dataset import mathematics
from actors.environments.dataset.mathematics import MathScorer
from configs.errors import SettingsError


@pytest.fixture(scope="module")
def scorer() -> MathScorer:
    pytest.importorskip("math_verify", reason="in the extra `math`")
    return MathScorer()


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
    ],
)
def test_expressions_are_compared_by_their_value(
    scorer: MathScorer, gold: str, text: str, score: float | None
) -> None:
    assert scorer(text, gold) == score


@pytest.mark.slow
def test_a_process_that_hangs_or_dies_costs_its_own_answer(
    scorer: MathScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scorer("\\boxed{1}", "1") == 1.0
    process = scorer._idle.queue[-1]
    assert process._process is not None

    process._process.kill()
    assert scorer("\\boxed{1}", "1") == 1.0

    os.kill(process._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(mathematics, "ANSWER_S", 0.2)
    assert scorer("\\boxed{1}", "1") == 0.0
    monkeypatch.undo()
    assert scorer("\\boxed{1}", "1") == 1.0


def test_a_reference_that_is_nothing_is_refused(scorer: MathScorer) -> None:
    with pytest.raises(ValueError, match="must be mathematics, got nothing"):
        scorer("", " ")


def test_without_the_package_or_with_an_old_one_the_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.8.1")
    with pytest.raises(SettingsError, match=r"must have math-verify >= 0.9, got 0.8.1; install"):
        MathScorer()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SettingsError, match=r"got none; install Nyala with the extra `math`"):
        MathScorer()
