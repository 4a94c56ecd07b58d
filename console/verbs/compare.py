"""`nyala compare`: which of two runs answers held-out questions better, and how soon each did.

`nyala sweep` reads the evaluations of its runs with it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from configs.errors import SettingsError
from configs.loader import load
from configs.settings import Settings
from console.command_line import AsJson
from console.display.display import print_line
from console.display.snapshot import duration
from console.report.curves import (
    EvaluationFigures,
    accumulated,
    durations,
    judged_by,
    read_curves,
    read_evaluations,
)
from console.report.record import grades_by
from console.run.run_folder import RunFolder, run_folder_of
from learner.data.grades import ACCURACY, REWARD, AnswerMetric, metrics_of
from learner.reporting.samples import SampleLine, read_samples

from .tables import ResultTable, print_facts

# --------------------------------------------------------------------------------------------------
# Paired bootstrap: an interval for the mean difference of two runs on the same questions.

Float64: TypeAlias = npt.NDArray[np.float64]

RESAMPLES = 10_000  # the ends of the interval move by a fiftieth of its width from seed to seed
CHUNK = 2**22  # draws held at a time, 32 MB
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean with the bounds that hold it in 95 of 100 samples of questions."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the choice of questions alone is unlikely to have made the difference."""
        return self.low > 0 or self.high < 0


def paired_interval(differences: Sequence[float] | Float64) -> Interval:
    """Bootstrap the mean of paired differences.

    Args:
        differences: One for each question, second run less first.

    Returns:
        The mean and its percentile interval of 95 %.

    Source:
        Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapters 8 and 13.
    """
    differences_Q = np.asarray(differences, dtype=np.float64)
    count = len(differences_Q)
    assert count > 0, "there are questions"
    random = np.random.default_rng(0)  # the same files give the same interval
    means: list[Float64] = []
    rows = max(1, min(RESAMPLES, CHUNK // count))
    for start in range(0, RESAMPLES, rows):
        drawn = random.integers(count, size=(min(rows, RESAMPLES - start), count))
        means.append(differences_Q[drawn].mean(axis=1))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
    return Interval(float(differences_Q.mean()), float(low), float(high))


# --------------------------------------------------------------------------------------------------
# Grades of a run's greedy answers to held-out questions, by question, from `samples.jsonl`.

Question = tuple[str, str]
"""Environment and digest of the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class EvaluationGrades:
    """The graded answers of one evaluation."""

    step: int
    """Batches that the policy was trained on."""
    grades: dict[Question, float]
    """0 to 1 = right; a question that was asked several times has the mean."""


def grades_of(
    lines: Iterable[SampleLine], metrics: Mapping[str, AnswerMetric], *, run: str, step: int | None
) -> EvaluationGrades:
    """Read the grades of one evaluation.

    Args:
        lines: Samples of the run.
        metrics: Environment -> what its answers are judged by.
        run: Name of the run, for errors.
        step: Step of the evaluation; None = the last.

    Raises:
        SettingsError: The answers were not kept.
    """
    kept: list[SampleLine] = []
    steps: set[int] = set()
    newest = -1 if step is None else step
    for line in lines:
        if line.kind != "eval" or line.sample != 0:
            continue
        steps.add(line.step)
        if step is None and line.step > newest:
            newest = line.step
            kept.clear()
        if line.step == newest:
            kept.append(line)
    if not kept:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise SettingsError(
            f"{run} must have kept the answers of an evaluation"
            f"{'' if step is None else f' after {step} batches'}, got evaluations after: {there}; "
            f"choose another with --step, or set run.eval_episodes and run.samples.max_mb above 0 "
            f"for the next run"
        )
    grade_of, by_question = grades_by(metrics, kept), defaultdict(list)
    for line in kept:
        by_question[line.environment, line.question].append(grade_of(line))
    return EvaluationGrades(
        newest, {question: fmean(grades) for question, grades in by_question.items()}
    )


def metrics_to_compare(
    first: Settings, second: Settings, names: tuple[str, str], chosen: str | None
) -> dict[str, AnswerMetric]:
    """Return the metric of each environment by which the answers of two runs are judged.

    Args:
        first: Settings of the first run.
        second: Settings of the second run.
        names: Names of the two runs.
        chosen: A part of the reward, or `reward`, in place of each run's own metric.

    Raises:
        SettingsError: The runs are judged by different metrics.
    """
    metrics = [metrics_of(settings.run, settings.rewards) for settings in (first, second)]
    if chosen is not None:
        return {name: AnswerMetric(chosen, chosen) for by_name in metrics for name in by_name}
    for name in metrics[0].keys() & metrics[1].keys():
        judges = [judge_of(by_name, name) for by_name in (first, second)]
        if judges[0] != judges[1]:
            raise SettingsError(
                f"two runs must be judged alike to be compared, got {judges[0]} for {names[0]} and "
                f"{judges[1]} for {names[1]}; choose a part that both have, such as --metric exact"
            )
    return metrics[0] | metrics[1]


def judge_of(settings: Settings, name: str) -> str:
    """Name the metric of a run's answers; a reward is compared with its functions and weights."""
    metric = metrics_of(settings.run, settings.rewards)[name]
    if metric.part != REWARD:
        return metric.part
    functions = settings.run.by_environment[name].reward_functions
    parts = [*functions.values()] or ["the environment's own score"]
    weights = settings.rewards.weights
    of = ", ".join(f"{weights[part]:g} x {part}" for part in weights) or ", ".join(parts)
    return f"the reward ({of})"


def shared(first: EvaluationGrades, second: EvaluationGrades) -> list[Question]:
    """List the questions that both runs were asked.

    Raises:
        SettingsError: There is no common question.
    """
    questions = sorted(first.grades.keys() & second.grades.keys())
    if not questions:
        raise SettingsError(
            f"two runs must share held-out questions to be compared, got {len(first.grades)} and "
            f"{len(second.grades)} without a common one; give both the same environment, "
            "environment_settings, tokenizer and prompt"
        )
    return questions


# --------------------------------------------------------------------------------------------------
# Cost of a score that two runs have reached: batches, time, tokens.

KEYS = ("wall_s", "trained_tokens")


@dataclass(frozen=True, slots=True)
class TimeToScore:
    """The first evaluation of a run that reached a score."""

    step: int
    spent_s: float
    """Seconds of the learner from its first batch on, without the time between its lives."""
    tokens: float
    """Tokens that were trained by then."""


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """The evaluations of a run, and the tokens and seconds that each of its batches ended at."""

    evaluations: Sequence[EvaluationFigures]
    tokens_by_step: dict[int, float]
    spent_by_step: dict[int, float]

    @property
    def best(self) -> float:
        """Highest held-out score; 0 without an evaluation."""
        return max((evaluation.score for evaluation in self.evaluations), default=0.0)

    def reached(self, score: float) -> TimeToScore:
        """Find the first evaluation with at least this score; there has to be one."""
        first = next(evaluation for evaluation in self.evaluations if evaluation.score >= score)
        tokens = self.tokens_by_step.get(first.step, 0.0)
        return TimeToScore(first.step, first.spent_s, tokens)


def read_course(folder: Path) -> LearningCurve:
    """Read the evaluations of a run, with the tokens and seconds that led to each."""
    files = RunFolder(folder)
    curves = read_curves(files.metrics, KEYS)
    tokens = accumulated(curves.values["trained_tokens"])
    spent_s = accumulated(durations(curves.values["wall_s"]))
    spent_by_step = dict(zip(curves.steps, spent_s, strict=True))
    return LearningCurve(
        read_evaluations(files.evaluations, spent_by_step),
        dict(zip(curves.steps, tokens, strict=True)),
        spent_by_step,
    )


def same_score(first: LearningCurve, second: LearningCurve) -> float | None:
    """Return the highest score that both runs have reached, judged by the same.

    None where it is not above what both began with: then there is nothing to time.
    """
    titles = {e.result.title for course in (first, second) for e in course.evaluations}
    if len(titles) != 1:
        return None
    target = min(first.best, second.best)
    began = [course.evaluations[0].score for course in (first, second) if course.evaluations]
    return target if began and target > max(began) else None


# --------------------------------------------------------------------------------------------------
# The comparison of two runs: on the questions that both were asked, and in what they took.

EPSILON = 1e-9  # of a grade: partial credit is a float
POINTS = 100.0


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """The grades of two runs on the same questions."""

    environment: str | None
    """Environment of the questions; None = all of them."""
    first: float
    """Score of the first run."""
    second: float
    interval: Interval
    """Interval of the second run's score less the first's."""
    better: int
    """Questions on which the second run's grade is higher."""
    worse: int
    same: int

    @property
    def questions(self) -> int:
        """Number of shared questions."""
        return self.better + self.worse + self.same

    def as_json(self) -> dict[str, object]:
        """Return all fields, as they are printed in JSON."""
        return {**asdict(self), "questions": self.questions, "interval": self.interval._asdict()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two runs."""

    names: tuple[str, str]
    steps: tuple[int, int]
    """Batches after which each run was asked."""
    overall: ScoreDifference
    by_environment: Sequence[ScoreDifference]
    """Differences by environment, where there are several."""
    metric: str
    """Metric by which the answers are judged."""
    score: float | None
    """Score that both runs reached; None where neither rose to one."""
    reached: tuple[TimeToScore, TimeToScore] | None

    def sentences(self) -> list[str]:
        """Write the result, then the counts and the course that it comes from."""
        return [self._result(), self._counts(), *([] if self.reached is None else [self._course()])]

    def _result(self) -> str:
        (a, b), overall = self.names, self.overall
        first, second, interval = overall.first, overall.second, overall.interval
        if interval.excludes_zero and interval.mean > 0:  # the better one first, as it is read
            (a, b), (first, second) = (b, a), (second, first)
        elif interval.excludes_zero:
            interval = Interval(-interval.mean, -interval.high, -interval.low)
        by = "" if self.metric == ACCURACY else f" by {self.metric}"
        figures = (
            f"{first:.3f} against {second:.3f}{by} on the same {overall.questions:,} "
            f"held-out questions, {_points(interval.mean)} points (95 % interval "
            f"{_points(interval.low)} to {_points(interval.high)})"
        )
        if not interval.excludes_zero:
            return f"{a} and {b} cannot be told apart: {figures}"
        return f"{a} is better than {b}: {figures}"

    def _counts(self) -> str:
        (a, b), (step_a, step_b), overall = self.names, self.steps, self.overall
        return (
            f"{b}, after {step_b:,} batches, answers {overall.better:,} questions better than {a} "
            f"after {step_a:,}, {overall.worse:,} worse and {overall.same:,} alike"
        )

    def _course(self) -> str:
        assert self.reached is not None, "both have reached it"
        parts = [
            f"by {name} after {reached.step:,} batches, {duration(reached.spent_s)} and "
            f"{reached.tokens:,.0f} trained tokens"
            for name, reached in zip(self.names, self.reached, strict=True)
        ]
        return f"held-out {self.metric} {self.score:.3f} was reached {'; '.join(parts)}"

    def as_json(self) -> dict[str, object]:
        """Return all fields and the sentence, as they are printed in JSON."""
        return {
            **asdict(self),
            "overall": self.overall.as_json(),
            "by_environment": [difference.as_json() for difference in self.by_environment],
            "sentence": self._result(),
        }


def compare(
    first: Path, second: Path, *, step: int | None = None, metric: str | None = None
) -> Comparison:
    """Compare the held-out answers of two runs.

    Args:
        first: Folder of the first run.
        second: Folder of the second run.
        step: Batches after which both were evaluated; None = the last evaluation of each.
        metric: Part of the reward to judge by, or `reward`; None = the metric of the runs.

    Raises:
        SettingsError: A folder holds no run, a run has kept no answers, they are judged by
            different metrics, or they share no question.
    """
    folders = [run_folder_of(path).path for path in (first, second)]
    a, b = (folder.name for folder in folders)
    settings_a, settings_b = (load(RunFolder(folder).config) for folder in folders)
    metrics = metrics_to_compare(settings_a, settings_b, (a, b), metric)
    graded_a, graded_b = (
        grades_of(read_samples(folder), metrics, run=folder.name, step=step) for folder in folders
    )
    questions = shared(graded_a, graded_b)
    environments = sorted({environment for environment, _ in questions})
    courses = [read_course(folder) for folder in folders]
    score = same_score(*courses) if metric is None else None
    return Comparison(
        names=(a, b) if a != b else (str(first), str(second)),
        steps=(graded_a.step, graded_b.step),
        overall=_difference(None, questions, graded_a, graded_b),
        by_environment=[
            _difference(name, [q for q in questions if q[0] == name], graded_a, graded_b)
            for name in (environments if len(environments) > 1 else ())
        ],
        metric=metric or judged_by(course.evaluations for course in courses),
        score=score,
        reached=None if score is None else (courses[0].reached(score), courses[1].reached(score)),
    )


def _difference(
    environment: str | None,
    questions: Sequence[Question],
    first: EvaluationGrades,
    second: EvaluationGrades,
) -> ScoreDifference:
    before = [first.grades[question] for question in questions]
    after = [second.grades[question] for question in questions]
    differences = [b - a for a, b in zip(before, after, strict=True)]
    better = sum(difference > EPSILON for difference in differences)
    worse = sum(difference < -EPSILON for difference in differences)
    return ScoreDifference(
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


# --------------------------------------------------------------------------------------------------
# `nyala compare`: whether one run answers held-out questions better than another.

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("compare")
def compare_runs(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Folder of another run.")],
    step: Annotated[
        int | None,
        typer.Option(
            help="Compare the evaluations after so many batches. Default: the last of each run.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Judge by this part of the reward, such as exact, or by reward. Default: as the "
            "runs themselves (run.eval_metric).",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs on the held-out questions that both were asked.

    The 95 % interval is that of a paired bootstrap over questions. Another seed of training may
    make a larger difference: compare several runs of each before you trust a small one.

    Example: `nyala compare runs/before runs/after`
    """
    comparison = compare(first, second, step=step, metric=metric)
    if as_json:
        sys.stdout.write(json.dumps(comparison.as_json(), indent=2) + "\n")
        return
    console = Console()
    for sentence in comparison.sentences():
        print_line(console, f"{sentence}.")
    if comparison.by_environment:
        rows = [_row(comparison, difference) for difference in comparison.by_environment]
        print_facts(ResultTable("By environment:", rows), as_json=False, console=console)


def _row(comparison: Comparison, difference: ScoreDifference) -> dict[str, Any]:
    a, b = comparison.names
    low, high = 100 * difference.interval.low, 100 * difference.interval.high
    return {
        "environment": difference.environment,
        "questions": difference.questions,
        a: f"{difference.first:.3f}",
        b: f"{difference.second:.3f}",
        "points": f"{100 * difference.interval.mean:+.1f}",
        "95 % interval": f"{low:+.1f} to {high:+.1f}",
        "better": difference.better,
        "worse": difference.worse,
        "alike": difference.same,
    }
