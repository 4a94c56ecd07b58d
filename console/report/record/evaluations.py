"""The evaluations of a run, each at the time of the batch that it followed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from console.display.json_lines import number, read_rows
from console.display.progress import accuracies


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of one evaluation."""

    step: int
    accuracy: float
    spent_s: float
    """Time of the learner from its first batch on, without what lay between its lives."""
    by_environment: Mapping[str, float] = field(default_factory=dict)
    """Where there are several."""


def read_evaluations(path: Path, spent_s: Mapping[int, float]) -> list[Evaluation]:
    """Read those with an answer.

    Args:
        path: `eval.jsonl` of the run.
        spent_s: Batch -> seconds of the learner until it was trained.
    """
    return [
        Evaluation(
            step=int(number(row, "step")),
            accuracy=number(row, "accuracy"),
            spent_s=spent_s.get(int(number(row, "step")), 0.0),
            by_environment=accuracies(row),
        )
        for row in read_rows(path)
        if math.isfinite(number(row, "accuracy", default=math.nan))
    ]
