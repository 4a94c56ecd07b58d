"""Grades of a run's greedy answers to held-out questions, by question, from `samples.jsonl`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from configs.errors import SettingsError
from learner.reporting.sample_lines import SampleLine

Question = tuple[str, str]
"""Environment and digest of the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The answers of one evaluation."""

    step: int
    """Batches that the policy was trained on."""
    grades: dict[Question, float]
    """0 to 1 = right; a question that was asked several times has the mean."""


def grades_of(lines: Iterable[SampleLine], *, run: str, step: int | None) -> Graded:
    """Read the grades of one evaluation.

    Args:
        lines: Samples of the run.
        run: Its name, for the error.
        step: Which evaluation; None = the last.

    Raises:
        SettingsError: Its answers were not kept.
    """
    found: dict[Question, list[float]] = defaultdict(list)
    steps: set[int] = set()
    newest = -1 if step is None else step
    for line in lines:
        if line.kind != "eval" or line.sample != 0:
            continue
        steps.add(line.step)
        if step is None and line.step > newest:
            newest = line.step
            found.clear()
        if line.step == newest:
            found[line.environment, line.question].append(line.parts.get("exact", line.reward))
    if not found:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise SettingsError(
            f"{run} must have kept the answers of an evaluation"
            f"{'' if step is None else f' after {step} batches'}, got evaluations after: {there}; "
            f"set run.eval_episodes and run.samples.max_mb, or choose another with --step"
        )
    return Graded(newest, {question: fmean(grades) for question, grades in found.items()})


def shared(first: Graded, second: Graded) -> list[Question]:
    """List the questions that both were asked.

    Raises:
        SettingsError: There is none.
    """
    questions = sorted(first.grades.keys() & second.grades.keys())
    if not questions:
        raise SettingsError(
            f"two runs must share held-out questions to be compared, got {len(first.grades)} and "
            f"{len(second.grades)} without a common one; give both the same environment, "
            "environment_settings, tokenizer and prompt"
        )
    return questions
