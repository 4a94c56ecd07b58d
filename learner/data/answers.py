"""Figures of an evaluation's answers: accuracy, mean reward, avg@n and pass@k.

Legend of estimates: n sampled answers to a question, c of them right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from buffer.record.episode import Episode


class Answer(NamedTuple):
    """One answer to a held-out question."""

    environment: str
    question: int
    """Number of the question in the round."""
    sample: int
    """0 = the greedy answer."""
    episode: Episode


def exactness(episode: Episode) -> float:
    """Grade an answer: 0 to 1 = right."""
    return episode.reward_parts.get("exact", episode.reward)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that one of k answers is right, without bias.

    Args:
        n: Answers.
        c: How many of them are right.
        k: At most n.

    Source:
        Chen et al. 2021, arXiv:2107.03374, equation 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def figures_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Return `accuracy` and `reward` of the greedy answers, `avg@n` and `pass@k` of the others.

    `avg@n` is the mean over questions of the mean grade of their answers, n the most that one of
    them has. `pass@k`, for powers of two up to n, is the mean over the questions that have at least
    k answers; an answer is right from a grade of 1 on. What has no answer is left out.
    """
    figures: dict[str, float] = {}
    greedy = [answer.episode for answer in answers if answer.sample == 0]
    if greedy:
        figures["accuracy"] = float(np.mean([exactness(episode) for episode in greedy]))
        figures["reward"] = float(np.mean([episode.reward for episode in greedy]))
    grades: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        if answer.sample > 0:
            grades[answer.question].append(exactness(answer.episode))
    if grades:
        most = max(map(len, grades.values()))
        figures[f"avg@{most}"] = float(np.mean([np.mean(each) for each in grades.values()]))
        for k in _powers_of_two(most):
            passed = [_passed(each, k) for each in grades.values() if len(each) >= k]
            figures[f"pass@{k}"] = float(np.mean(passed))
    return figures


def environment_figures(
    answers: Sequence[Answer], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the figures of each environment, and its number of answers as `episodes`."""
    found = {}
    for name in names:
        own = [answer for answer in answers if answer.environment == name]
        if own:
            found[name] = {**figures_of(own), "episodes": len(own)}
    return found


def _passed(grades: Sequence[float], k: int) -> float:
    return pass_at_k(len(grades), sum(grade >= 1.0 for grade in grades), k)


def _powers_of_two(most: int) -> Iterable[int]:
    return (1 << exponent for exponent in range(most.bit_length()))
