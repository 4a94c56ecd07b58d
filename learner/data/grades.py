"""Grades of held-out answers: the part of the reward that judges them, and its title.

`run.eval_metric` names the part. Without it, answers are judged by what is trained: by the part
`exact` where the environment's own score is the reward and has one, else by the reward. Loads
without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from buffer.record.wire import MAX_ENTRIES
from configs.settings import RunSettings
from configs.tables.algorithm import RewardSettings

EXACT, REWARD = "exact", "reward"
ACCURACY = "accuracy"
"""Title of the part `exact` where it is trained."""
LOG_LIKELIHOOD = "log-likelihood"
"""Title of rows that supervised training sets aside: minus their loss, so that more is better."""
MIXED = "score"
"""Title of answers that are judged by different parts."""


@dataclass(frozen=True, slots=True)
class AnswerMetric:
    """The metric by which the answers of one environment are judged."""

    part: str = EXACT
    """Name of a part, or `reward` for the whole reward."""
    title: str = ACCURACY
    """Title that is shown to people."""

    def in_answers(self, parts: Iterable[Mapping[str, float]]) -> AnswerMetric:
        """Return the metric that these answers have: the reward where none has the part."""
        return self if any(self.part in names for names in parts) else AnswerMetric(REWARD, REWARD)

    def grade(self, reward: float, parts: Mapping[str, float]) -> float:
        """Grade an answer, 1 = right; it counts 0 if it lacks a part that other answers have."""
        return reward if self.part == REWARD else parts.get(self.part, 0.0)


def metrics_of(run: RunSettings, rewards: RewardSettings) -> dict[str, AnswerMetric]:
    """Return the metric of each environment, by its name."""
    return {name: _metric(alone, rewards) for name, alone in run.by_environment.items()}


def weighs_exact(rewards: RewardSettings) -> bool:
    """Whether the part `exact` counts in the reward: without weights, or with one above 0."""
    return not rewards.weights or rewards.weights.get(EXACT, 0.0) > 0


def _metric(run: RunSettings, rewards: RewardSettings) -> AnswerMetric:
    is_trained = not run.reward_functions and weighs_exact(rewards)
    part = run.eval_metric or (EXACT if is_trained else REWARD)
    if part != EXACT or EXACT in run.reward_functions:
        return AnswerMetric(part, part)
    return AnswerMetric(
        EXACT, f"{ACCURACY} of the environment" if run.reward_functions else ACCURACY
    )


def common_title(titles: Iterable[str]) -> str:
    """Name the metric of several environments or runs; `MIXED` where they differ."""
    distinct = set(titles)
    return distinct.pop() if len(distinct) == 1 else MIXED


def mean_parts(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each named part, over the answers that have it.

    Of more than `MAX_ENTRIES` parts the rarest are left out.
    """
    parts: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.items():
            parts.setdefault(name, []).append(value)
    # Actors choose the names, and a line of metrics has a bounded length.
    usual = sorted(parts, key=lambda name: (-len(parts[name]), name))[:MAX_ENTRIES]
    return {name: float(np.mean(parts[name])) for name in sorted(usual)}


# --------------------------------------------------------------------------------------------------
# The result of an evaluation as its line of `eval.jsonl` has it.


class HeldOut(NamedTuple):
    """The score of greedy answers, and the title of their metric."""

    title: str
    score: float
    reward: float | None
    """Mean reward, where it is not that score."""

    @property
    def trained(self) -> float:
        """Mean reward of the answers, whatever their metric."""
        return self.score if self.reward is None else self.reward

    @property
    def label(self) -> str:
        """Name of the score beside figures of training."""
        return self.title if self.title.startswith(ACCURACY) else f"held-out {self.title}"


def held_out(line: Mapping[str, object]) -> HeldOut | None:
    """Read the score from a line, or from one environment's figures; None without answers."""
    score, reward = line.get("score", line.get(ACCURACY)), line.get(REWARD)
    if isinstance(score, bool) or not isinstance(score, int | float):
        return None
    title = str(line.get("metric", ACCURACY))
    is_other = title != REWARD and isinstance(reward, int | float) and reward != score
    return HeldOut(title, float(score), float(str(reward)) if is_other else None)
