"""Outcome of each run of a sweep: its score, and the figures beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from console.compare.reached import read_course
from console.display.figures import duration
from console.display.json_lines import number, read_rows
from console.report.charts.drawing import Point as Place
from console.run.run_folder import RunFolder

from .grid import Point

LAST = 10  # batches whose rewards are averaged: single batches jump


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run of the sweep, as far as it has come."""

    point: Point
    folder: Path
    state: str
    accuracies: Sequence[Place]
    """Batch and held-out accuracy of each evaluation."""
    reward: float
    """Mean over the last batches; NaN before the first."""
    batches: int
    spent_s: float

    @property
    def accuracy(self) -> float:
        """Held-out accuracy of the last evaluation; NaN without one."""
        return self.accuracies[-1][1] if self.accuracies else math.nan

    @property
    def figure(self) -> float:
        """What a search makes as large as it can: held-out accuracy, or reward without one."""
        return self.accuracy if math.isfinite(self.accuracy) else self.reward

    @property
    def score(self) -> tuple[float, float]:
        """Ranks runs: by held-out accuracy, then by reward; what is missing comes last."""
        return _or_least(self.accuracy), _or_least(self.reward)

    def short_row(self) -> dict[str, str]:
        """Write it for a terminal: the name has the values."""
        row = self.row()
        return {key: row[key] for key in ("run", "accuracy", "best", "reward", "batches", "state")}

    def row(self) -> dict[str, str]:
        """Write it for people."""
        best = max(self.accuracies, key=lambda place: place[1], default=None)
        return {
            "run": self.point.name,
            **self.point.values,
            "accuracy": _figure(self.accuracy),
            "best": "-" if best is None else f"{best[1]:.3f} ({best[0]:.0f})",
            "reward": _figure(self.reward),
            "batches": f"{self.batches:,}",
            "time": duration(self.spent_s),
            "state": self.state,
        }


def outcome_of(point: Point, folder: Path) -> Outcome:
    """Read how far a run is."""
    files = RunFolder(folder)
    course = read_course(folder)
    rows = read_rows(files.metrics)
    rewards = [number(row, "reward_mean", default=math.nan) for row in rows[-LAST:]]
    return Outcome(
        point=point,
        folder=folder,
        state=str(files.state),
        accuracies=[(float(each.step), each.accuracy) for each in course.evaluations],
        reward=fmean(rewards) if rewards else math.nan,
        batches=int(number(rows[-1], "step")) if rows else 0,
        spent_s=max(course.spent_by_step.values(), default=0.0),
    )


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sort runs, the best one first."""
    return sorted(outcomes, key=lambda each: each.score, reverse=True)


def _figure(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def _or_least(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
