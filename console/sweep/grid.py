"""Runs of a sweep: one for each combination of values, named by them, and the outcome of each.

A name depends on nothing but its own values, so a sweep that is typed again, or with further
values, finds the runs that it has already made.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from configs.errors import SettingsError
from configs.json_lines import number, read_rows
from console.display.snapshot import duration
from console.report.curves import judged_by
from console.report.drawing import Point
from console.run.run_folder import RunFolder
from console.verbs.compare import read_course

MAX_RUNS = 256  # of one sweep: more is a mistake, such as ranges written out
LONGEST_NAME = 63
DIGEST_CHARACTERS = 8
OPENING, CLOSING, QUOTES = "[{", "]}", "'\""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and its values."""

    path: str
    values: tuple[str, ...]
    """The values as they were typed."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a sweep."""

    name: str
    values: Mapping[str, str]
    """Path of a setting -> its value."""

    @property
    def overrides(self) -> list[str]:
        """The values of this point as `--set` takes them."""
        return [f"{path}={value}" for path, value in self.values.items()]


def parse_axis(text: str) -> Axis:
    """Read an axis such as `learner.lr=1e-6,3e-6`.

    Raises:
        SettingsError: The text is no axis.

    Example:
        >>> parse_axis("learner.offload=[],[parameters, activations]").values
        ('[]', '[parameters, activations]')
    """
    path, equals, values = text.partition("=")
    parsed = [value.strip() for value in _split(values)]
    if not equals or "." not in path or not all(parsed) or len({*parsed}) < len(parsed):
        raise SettingsError(
            f"--over must be a setting and its values, each once, got {text!r}; write "
            "--over learner.lr=1e-6,3e-6"
        )
    return Axis(path.strip(), tuple(parsed))


def grid(axes: Sequence[Axis], *, base: str) -> list[SweepPoint]:
    """Combine all values of all axes; the last axis changes fastest.

    Args:
        axes: Settings that change, with their values.
        base: Name that the names of the runs begin with.

    Raises:
        SettingsError: A setting is there twice, there are too many runs, or there is none.
    """
    paths = [axis.path for axis in axes]
    if not axes or len({*paths}) < len(paths):
        raise SettingsError(
            f"a sweep must have settings to change, each once, got {paths}; write "
            "--over learner.lr=1e-6,3e-6"
        )
    combinations = product(*(axis.values for axis in axes))
    points = [
        named_point(dict(zip(paths, combination, strict=True)), base)
        for combination in combinations
    ]
    if len(points) > MAX_RUNS:
        raise SettingsError(
            f"a sweep must have at most {MAX_RUNS} runs, got {len(points)}; leave values out"
        )
    return points


def named_point(values: Mapping[str, str], base: str) -> SweepPoint:
    """Return a point with a name made from its values."""
    ends = [path.rpartition(".")[2] for path in values]
    short = ends if len({*ends}) == len(ends) else list(values)
    text = "-".join(f"{name}_{value}" for name, value in zip(short, values.values(), strict=True))
    name = f"{base}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', text)}"
    if name != f"{base}-{text}" or len(name) > LONGEST_NAME:
        # What was replaced or cut off may be all that tells two runs apart.
        digest = hashlib.blake2b(repr(sorted(values.items())).encode()).hexdigest()
        name = f"{name[: LONGEST_NAME - DIGEST_CHARACTERS - 1]}-{digest[:DIGEST_CHARACTERS]}"
    return SweepPoint(name, values)


def _split(text: str) -> list[str]:
    """Split a text at commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        depth += (character in OPENING) - (character in CLOSING) if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


# --------------------------------------------------------------------------------------------------
# Outcome of each run of a sweep: its score, and the figures beside it.

LAST = 10  # batches whose rewards are averaged: single batches jump


@dataclass(frozen=True, slots=True)
class SweepRunProgress:
    """The progress of one run of the sweep."""

    point: SweepPoint
    folder: Path
    state: str
    scores: Sequence[Point]
    """Batch and held-out score of each evaluation."""
    judged_by: str
    """Metric of the score, such as `accuracy`."""
    reward: float
    """Mean over the last batches; NaN before the first."""
    batches: int
    spent_s: float

    @property
    def held_out(self) -> float:
        """Held-out score of the last evaluation; NaN without one."""
        return self.scores[-1][1] if self.scores else math.nan

    @property
    def figure(self) -> float:
        """The figure that a search maximises: held-out score, or reward without one."""
        return self.held_out if math.isfinite(self.held_out) else self.reward

    @property
    def score(self) -> tuple[float, float]:
        """Rank of a run: by held-out score, then by reward; missing figures come last."""
        return _or_least(self.held_out), _or_least(self.reward)

    def short_row(self) -> dict[str, str]:
        """Write the outcome as a row for a terminal; the name holds the values."""
        row = self.row()
        return {
            key: row[key] for key in ("run", "held out", "of", "best", "reward", "batches", "state")
        }

    def row(self) -> dict[str, str]:
        """Write the outcome as a row for people."""
        best = max(self.scores, key=lambda place: place[1], default=None)
        return {
            "run": self.point.name,
            **self.point.values,
            "held out": _figure(self.held_out),
            "of": self.judged_by if self.scores else "-",
            "best": "-" if best is None else f"{best[1]:.3f} ({best[0]:.0f})",
            "reward": _figure(self.reward),
            "batches": f"{self.batches:,}",
            "time": duration(self.spent_s),
            "state": self.state,
        }


def outcome_of(point: SweepPoint, folder: Path) -> SweepRunProgress:
    """Read the outcome of a run from its folder."""
    files = RunFolder(folder)
    course = read_course(folder)
    rows = read_rows(files.metrics)
    rewards = [number(row, "reward_mean", default=math.nan) for row in rows[-LAST:]]
    return SweepRunProgress(
        point=point,
        folder=folder,
        state=str(files.state),
        scores=[(float(evaluation.step), evaluation.score) for evaluation in course.evaluations],
        judged_by=judged_by([course.evaluations]),
        reward=fmean(rewards) if rewards else math.nan,
        batches=int(number(rows[-1], "step")) if rows else 0,
        spent_s=max(course.spent_by_step.values(), default=0.0),
    )


def ranked(outcomes: Sequence[SweepRunProgress]) -> list[SweepRunProgress]:
    """Sort runs, the best one first."""
    return sorted(outcomes, key=lambda outcome: outcome.score, reverse=True)


def _figure(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def _or_least(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
