"""Figures of an evaluation's answers, against counting by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from learner.data.evaluation import EvaluationAnswer, environment_figures, figures_of, pass_at_k
from learner.data.grades import AnswerMetric
from tests.learner.support.made_episodes import make_episode

METRICS = dict.fromkeys(("sums", "words", "exam"), AnswerMetric("reward", "reward"))


def answer(question: int, sample: int, grade: float, environment: str = "sums") -> EvaluationAnswer:
    return EvaluationAnswer(
        environment, question, sample, replace(make_episode(reward=grade), reward_parts={})
    )


@pytest.mark.parametrize(("n", "c"), [(4, 0), (4, 1), (5, 2), (6, 5), (3, 3)])
def test_pass_at_k_is_the_share_of_choices_of_k_that_have_a_right_answer(n: int, c: int) -> None:
    answers = [1] * c + [0] * (n - c)

    for k in range(1, n + 1):
        choices = list(combinations(answers, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(max, choices)) / len(choices))


def test_greedy_answers_and_sampled_ones_have_figures_of_their_own() -> None:
    grades = {0: [1.0, 1.0, 0.5, 0.0, 0.0], 1: [0.5, 0.0, 0.0, 0.0, 0.0]}
    answers = [answer(q, i, grade) for q, all_ in grades.items() for i, grade in enumerate(all_)]

    assert figures_of(answers, METRICS) == {
        "score": 0.75,
        "reward": 0.75,
        "avg@4": pytest.approx((1.5 / 4 + 0) / 2),
        "pass@1": pytest.approx((1 / 4 + 0) / 2),
        "pass@2": pytest.approx((1 / 2 + 0) / 2),
        "pass@4": 0.5,
    }


def test_a_question_counts_for_pass_at_k_where_it_has_k_answers() -> None:
    whole = [answer(0, i, float(i == 1)) for i in range(1, 5)]
    lost = [answer(1, i, 1.0) for i in (1, 4)]  # two of its answers never came

    figures = figures_of([*whole, *lost], METRICS)

    assert figures == {"avg@4": 0.625, "pass@1": 0.625, "pass@2": 0.75, "pass@4": 1.0}


def test_no_more_than_the_answers_that_there_are_is_estimated() -> None:
    assert figures_of([], METRICS) == {}
    assert figures_of([answer(0, i, 1.0) for i in (1, 2, 3)], METRICS).keys() == {
        "avg@3",
        "pass@1",
        "pass@2",
    }


def test_each_environment_has_its_own_figures_and_one_without_answers_has_none() -> None:
    answers = [answer(0, 0, 1.0), answer(1, 0, 0.0), answer(2, 0, 0.5, "words")]

    assert environment_figures(answers, METRICS) == {
        "sums": {"score": 0.5, "reward": 0.5, "episodes": 2, "metric": "reward"},
        "words": {"score": 0.5, "reward": 0.5, "episodes": 1, "metric": "reward"},
    }
