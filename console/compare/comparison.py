"""The comparison of two runs: on the questions that both were asked, and in what they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from console.display.figures import duration
from console.run.run_folder import run_folder_of
from learner.reporting.sample_files import read_samples

from .bootstrap import Interval, paired_interval
from .grades import Graded, Question, grades_of, shared
from .reached import Reached, read_course, same_accuracy

EPSILON = 1e-9  # of a grade: partial credit is a float
POINTS = 100.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Two runs on the same questions."""

    environment: str | None
    """None = all of them."""
    first: float
    """Accuracy of the first run."""
    second: float
    interval: Interval
    """Of second less first."""
    better: int
    """Questions on which the second run's grade is higher."""
    worse: int
    same: int

    @property
    def questions(self) -> int:
        """Number of shared questions."""
        return self.better + self.worse + self.same

    def as_json(self) -> dict[str, object]:
        """Return its fields."""
        return {**asdict(self), "questions": self.questions, "interval": self.interval._asdict()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that is compared."""

    names: tuple[str, str]
    steps: tuple[int, int]
    """Batches after which each was asked."""
    overall: Difference
    by_environment: Sequence[Difference]
    """Where there are several."""
    accuracy: float | None
    """That both reached; None where neither rose to one."""
    reached: tuple[Reached, Reached] | None

    def sentences(self) -> list[str]:
        """Write the result, then where it comes from."""
        return [self._result(), self._counts(), *([] if self.reached is None else [self._course()])]

    def _result(self) -> str:
        a, b = self.names
        found, interval = self.overall, self.overall.interval
        figures = (
            f"{found.first:.3f} against {found.second:.3f} on the same {found.questions:,} "
            f"held-out questions, {_points(interval.mean)} points (95 % interval "
            f"{_points(interval.low)} to {_points(interval.high)})"
        )
        if not interval.excludes_zero:
            return f"{a} and {b} cannot be told apart: {figures}"
        return f"{b} is {'better' if interval.mean > 0 else 'worse'} than {a}: {figures}"

    def _counts(self) -> str:
        (a, b), (step_a, step_b), found = self.names, self.steps, self.overall
        return (
            f"{b}, after {step_b:,} batches, answers {found.better:,} questions better than {a} "
            f"after {step_a:,}, {found.worse:,} worse and {found.same:,} alike"
        )

    def _course(self) -> str:
        assert self.reached is not None, "both have reached it"
        parts = [
            f"by {name} after {each.step:,} batches, {duration(each.spent_s)} and "
            f"{each.tokens:,.0f} trained tokens"
            for name, each in zip(self.names, self.reached, strict=True)
        ]
        return f"held-out accuracy {self.accuracy:.3f} was reached {'; '.join(parts)}"

    def as_json(self) -> dict[str, object]:
        """Return its fields."""
        return {
            **asdict(self),
            "overall": self.overall.as_json(),
            "by_environment": [each.as_json() for each in self.by_environment],
            "sentence": self._result(),
        }


def compare(first: Path, second: Path, *, step: int | None = None) -> Comparison:
    """Compare two runs.

    Args:
        first: Folder of a run.
        second: Of the other.
        step: Batches after which both were evaluated; None = the last evaluation of each.

    Raises:
        SettingsError: One is no run, has kept no answers, or they share no question.
    """
    folders = [run_folder_of(path).path for path in (first, second)]
    a, b = (folder.name for folder in folders)
    graded_a, graded_b = (
        grades_of(read_samples(folder), run=folder.name, step=step) for folder in folders
    )
    questions = shared(graded_a, graded_b)
    environments = sorted({environment for environment, _ in questions})
    courses = [read_course(folder) for folder in folders]
    accuracy = same_accuracy(*courses)
    return Comparison(
        names=(a, b) if a != b else (str(first), str(second)),
        steps=(graded_a.step, graded_b.step),
        overall=_difference(None, questions, graded_a, graded_b),
        by_environment=[
            _difference(name, [q for q in questions if q[0] == name], graded_a, graded_b)
            for name in (environments if len(environments) > 1 else ())
        ],
        accuracy=accuracy,
        reached=None
        if accuracy is None
        else (courses[0].reached(accuracy), courses[1].reached(accuracy)),
    )


def _difference(
    environment: str | None, questions: Sequence[Question], first: Graded, second: Graded
) -> Difference:
    before = [first.grades[question] for question in questions]
    after = [second.grades[question] for question in questions]
    differences = [b - a for a, b in zip(before, after, strict=True)]
    better = sum(difference > EPSILON for difference in differences)
    worse = sum(difference < -EPSILON for difference in differences)
    return Difference(
        environment=environment,
        first=fmean(before),
        second=fmean(after),
        interval=paired_interval(differences),
        better=better,
        worse=worse,
        same=len(differences) - better - worse,
    )


def _points(value: float) -> str:
    return f"{value * POINTS:+.1f}"
