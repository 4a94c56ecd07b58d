"""Cost of an accuracy that two runs have reached: batches, time, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from console.report.record.curves import read_curves
from console.report.record.derived import accumulated, durations
from console.report.record.evaluations import Evaluation, read_evaluations
from console.run.run_folder import RunFolder

KEYS = ("wall_s", "trained_tokens")


@dataclass(frozen=True, slots=True)
class Reached:
    """The first evaluation of a run that reached an accuracy."""

    step: int
    spent_s: float
    """Of the learner from its first batch on, without what lay between its lives."""
    tokens: float
    """That were trained by then."""


@dataclass(frozen=True, slots=True)
class Course:
    """The evaluations of a run, and the tokens and seconds that each of its batches ended at."""

    evaluations: Sequence[Evaluation]
    tokens_by_step: dict[int, float]
    spent_by_step: dict[int, float]

    @property
    def best(self) -> float:
        """Highest held-out accuracy; 0 without an evaluation."""
        return max((each.accuracy for each in self.evaluations), default=0.0)

    def reached(self, accuracy: float) -> Reached:
        """Find the first evaluation with at least this accuracy."""
        first = next(each for each in self.evaluations if each.accuracy >= accuracy)
        tokens = self.tokens_by_step.get(first.step, 0.0)
        return Reached(first.step, first.spent_s, tokens)


def read_course(folder: Path) -> Course:
    """Read how a run went."""
    files = RunFolder(folder)
    curves = read_curves(files.metrics, KEYS)
    tokens = accumulated(curves.values["trained_tokens"])
    spent_s = accumulated(durations(curves.values["wall_s"]))
    spent_by_step = dict(zip(curves.steps, spent_s, strict=True))
    return Course(
        read_evaluations(files.evaluations, spent_by_step),
        dict(zip(curves.steps, tokens, strict=True)),
        spent_by_step,
    )


def same_accuracy(first: Course, second: Course) -> float | None:
    """Return the highest accuracy that both runs have reached.

    None where it is not above what both began with: then there is nothing to time.
    """
    target = min(first.best, second.best)
    began = [course.evaluations[0].accuracy for course in (first, second) if course.evaluations]
    return target if began and target > max(began) else None
