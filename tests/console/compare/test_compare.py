"""`nyala compare`: two runs that differ, two that do not, and what cannot be compared."""

import json
from random import Random

import numpy as np
import pytest
from typer.testing import CliRunner

from configs.errors import SettingsError
from console.main import app
from console.verbs.compare import compare, paired_interval
from tests.console.support.made_run import answers, made_run


def run_with(folder, last, *, first=None, step=4, environment="spell", **figures):
    """Make a run whose last evaluation has these grades, by question."""
    tokens = figures.pop("trained_tokens", 100)
    made_run(folder, metrics=lambda _: {"trained_tokens": tokens, **figures})
    answers(folder, step=0, grades=first or dict.fromkeys(last, 0.0), environment=environment)
    answers(folder, step=step, grades=last, environment=environment)
    return folder


def graded(right, of=200):
    """Grade questions; these numbers of them are right."""
    return {f"q{number:03d}": float(number in right) for number in range(of)}


def test_a_run_that_answers_more_is_better(tmp_path):
    a = run_with(tmp_path / "a", graded(range(100)))
    b = run_with(tmp_path / "b", graded(range(130)))

    found = compare(a, b)

    assert (found.overall.first, found.overall.second) == (0.5, 0.65)
    assert (found.overall.better, found.overall.worse, found.overall.same) == (30, 0, 170)
    assert found.sentences()[0].startswith(
        "b is better than a: 0.650 against 0.500 on the same 200 held-out questions, +15.0 points"
    )
    assert compare(b, a).sentences()[0].startswith("b is better than a: 0.650 against 0.500")


def test_runs_that_win_as_often_as_they_lose_cannot_be_told_apart(tmp_path):
    a = run_with(tmp_path / "a", graded(range(100)))
    b = run_with(tmp_path / "b", graded(range(20, 122)))

    found = compare(a, b)

    assert (found.overall.better, found.overall.worse) == (22, 20)
    assert found.sentences()[0].startswith("a and b cannot be told apart: 0.500 against 0.510")
    assert found.overall.interval.low < 0 < found.overall.interval.high


def test_the_same_questions_are_compared_pair_by_pair(tmp_path):
    """Six answers of 200 turned right: noise for two samples, not for pairs."""
    noisy = {number for number in range(200) if Random(number).random() < 0.5}
    a = run_with(tmp_path / "a", graded(noisy - set(range(6))))
    b = run_with(tmp_path / "b", graded(noisy | set(range(6))))

    assert compare(a, b).overall.interval.excludes_zero


def test_only_questions_that_both_were_asked_count(tmp_path):
    a = run_with(tmp_path / "a", {"x": 0.0, "y": 1.0, "only a": 0.0})
    b = run_with(tmp_path / "b", {"x": 0.0, "y": 1.0, "only b": 1.0})

    found = compare(a, b)

    assert found.overall.questions == 2
    assert (found.overall.first, found.overall.second) == (0.5, 0.5)


def test_runs_of_different_questions_are_refused(tmp_path):
    a, b = run_with(tmp_path / "a", {"x": 0.0}), run_with(tmp_path / "b", {"y": 0.0})

    with pytest.raises(SettingsError, match="must share held-out questions"):
        compare(a, b)


def test_an_evaluation_that_was_not_kept_is_refused_with_those_that_were(tmp_path):
    a, b = run_with(tmp_path / "a", {"x": 0.0}), run_with(tmp_path / "b", {"x": 0.0})

    assert compare(a, b, step=0).steps == (0, 0)
    with pytest.raises(SettingsError, match=r"after 2 batches, got evaluations after: 0, 4"):
        compare(a, b, step=2)


def test_time_and_tokens_are_those_of_the_same_accuracy(tmp_path):
    grades = graded(range(100))
    a = run_with(tmp_path / "a", grades, trained_tokens=100)
    b = run_with(tmp_path / "b", graded(range(150)), step=2, trained_tokens=30)
    answers(b, step=4, grades=graded(range(160)))

    found = compare(a, b)

    assert found.score == 0.5
    assert found.reached is not None
    assert [(each.step, each.spent_s, each.tokens) for each in found.reached] == [
        (4, 6.0, 400.0),
        (2, 2.0, 60.0),
    ]
    assert found.sentences()[2] == (
        "held-out accuracy 0.500 was reached by a after 4 batches, 6 s and 400 trained tokens; "
        "by b after 2 batches, 2 s and 60 trained tokens"
    )


def test_runs_that_never_rose_have_nothing_to_time(tmp_path):
    grades = graded(range(100))
    a = run_with(tmp_path / "a", grades, first=grades)
    b = run_with(tmp_path / "b", grades)

    assert compare(a, b).reached is None


def test_environments_are_compared_by_themselves_too(tmp_path):
    folders = []
    for name, right in (("a", 0.0), ("b", 1.0)):
        folder = run_with(tmp_path / name, {"x": 0.0, "y": 0.0}, environment="sort")
        answers(folder, step=4, grades={"x": right}, environment="spell")
        folders.append(folder)

    done = CliRunner().invoke(app, ["compare", *map(str, folders), "--json"])

    found = json.loads(done.stdout)
    assert [(e["environment"], e["second"]) for e in found["by_environment"]] == [
        ("sort", 0.0),
        ("spell", 1.0),
    ]
    assert found["overall"]["questions"] == 3


def test_the_interval_holds_the_truth_in_95_of_100_samples():
    random = np.random.default_rng(1)
    trials, truth = 120, 0.1

    intervals = [
        paired_interval(random.choice([-1.0, 0.0, 1.0], 80, p=[0.1, 0.7, 0.2]))
        for _ in range(trials)
    ]

    share = np.mean([low <= truth <= high for _, low, high in intervals])
    assert 0.9 <= share < 1.0


def test_the_interval_is_that_of_the_normal_approximation_where_questions_are_many():
    random = np.random.default_rng(2)
    differences = random.choice([-1.0, 0.0, 1.0], 4000, p=[0.2, 0.5, 0.3])

    interval = paired_interval(differences)

    error = 1.96 * differences.std() / np.sqrt(4000)
    assert interval.mean == differences.mean()
    assert interval.low == pytest.approx(differences.mean() - error, abs=0.001)
    assert interval.high == pytest.approx(differences.mean() + error, abs=0.001)
