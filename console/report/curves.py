"""Figures of a run by batch, and its evaluations, from `metrics.jsonl` and `eval.jsonl`.

Reports, model cards, `nyala compare` and `nyala sweep` read a run with it.

Only the figures that a report draws are held, as machine numbers: a run of a hundred thousand
batches takes some 45 MB. A batch that is there twice counts as its later line, and batches trained
after it in an abandoned branch are dropped, as the learner's own rewind does it.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from configs.json_lines import number, read_rows
from console.display.progress import scores_in
from learner.data.grades import ACCURACY, HeldOut, common_title, held_out
from learner.reporting.figures import FIGURES, NO_SIGNAL, TOKENS, ChartLine, Plot
from learner.training import ratio_bins

# --------------------------------------------------------------------------------------------------
# Figures that a report draws over the batches of a run.

PERCENTILES = ("1", "5", "25", "50", "75", "95", "99")

DERIVED = {
    "tokens_per_s": ChartLine(TOKENS, "tokens/s"),
    "zero_variance_fraction": ChartLine(NO_SIGNAL, "groups of equal rewards"),
}
"""Figures that are computed from others."""

LINES = {figure.key: figure.chart for figure in FIGURES if figure.chart} | DERIVED

KEYS = tuple(
    dict.fromkeys(
        [
            *(key for key in LINES if key not in DERIVED),
            *(f"ratio_percentiles.{percent}" for percent in PERCENTILES),
            *(f"log_ratio_histogram.{name}" for name in ratio_bins.NAMES),
            "completion_tokens",
            "reused_tokens",
            "zero_variance_groups",
            "groups",
            "wall_s",
            "lineage",
        ]
    )
)
"""Keys that are read from `metrics.jsonl`."""


def lines_of(plot: Plot) -> dict[str, ChartLine]:
    """List the lines of a chart, by their figures."""
    return {key: line for key, line in LINES.items() if line.plot is plot}


# --------------------------------------------------------------------------------------------------
# Figures of a run by batch, read from `metrics.jsonl` line by line.

MAX_ACTORS = 4096  # incarnations remembered: of a fleet of spot machines the newest come and go

NAN = math.nan


@dataclass(slots=True)
class ActorBatchRange:
    """The batches that trained episodes which one incarnation of an actor had finished."""

    first: int
    last: int
    episodes: int = 0


@dataclass(slots=True)
class Curves:
    """The figures of a run by batch."""

    steps: list[int] = field(default_factory=list)
    """Numbers of the batches, ascending."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """When each was trained, Unix seconds."""
    values: dict[str, array[float]] = field(default_factory=dict)
    """Figure -> its value at each batch, NaN where it has none. `a.b` is the entry b of a table."""
    lags: Counter[int] = field(default_factory=Counter)
    """Policy lag -> trained tokens of the whole run."""
    actors: dict[str, ActorBatchRange] = field(default_factory=dict)
    alerts: Counter[str] = field(default_factory=Counter)
    """Alert of the guards -> batches that had it."""
    alerts_at: dict[str, int] = field(default_factory=dict)
    """Alert -> its newest batch."""
    advice: dict[str, str] = field(default_factory=dict)
    """Rule of the advisor -> its newest advice."""
    advice_at: dict[str, int] = field(default_factory=dict)
    """Rule -> the newest batch whose line had it."""


def read_curves(path: Path, keys: Sequence[str]) -> Curves:
    """Read the figures of a run; they are empty while it has trained no batch.

    Args:
        path: Path of `metrics.jsonl`, to which the learner may be writing.
        keys: Figures to hold.
    """
    curves = Curves(values={key: array("d") for key in keys})
    for row in _rows(path):
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        _rewind(curves, step)
        curves.steps.append(step)
        curves.times.append(number(row, "time"))
        for key in keys:
            curves.values[key].append(_number(_entry(row, key)))
        _count(curves, row, step)
    return curves


def _rewind(curves: Curves, step: int) -> None:
    while curves.steps and curves.steps[-1] >= step:
        curves.steps.pop()
        curves.times.pop()
        for values in curves.values.values():
            values.pop()


def _count(curves: Curves, row: Mapping[str, object], step: int) -> None:
    """Add the lags, actors, alerts and advice of a batch."""
    for lag, tokens in _table(row.get("policy_lag_histogram")):
        if lag.isdecimal():
            curves.lags[int(lag)] += int(tokens)
    for actor, episodes in _table(row.get("episodes_by_actor")):
        if actor in curves.actors or len(curves.actors) < MAX_ACTORS:
            presence = curves.actors.setdefault(actor, ActorBatchRange(step, step))
            presence.last = step
            presence.episodes += int(episodes)
    for name in _texts(row.get("alerts")):
        curves.alerts[name] += 1
        curves.alerts_at[name] = step
    for rule, text in _advice(row.get("advice")):
        curves.advice[rule], curves.advice_at[rule] = text, step


def _rows(path: Path) -> Iterator[dict[str, object]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line of a killed process, or one that is being written
            if isinstance(row, dict):
                yield row


def _entry(row: Mapping[str, object], key: str) -> object:
    table, dot, name = key.partition(".")
    entry = row.get(table)
    if not dot:
        return entry
    return entry.get(name) if isinstance(entry, dict) else None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NAN
    return float(value)


def _table(value: object) -> Iterable[tuple[str, float]]:
    entries = value.items() if isinstance(value, dict) else ()
    return [
        (str(name), number) for name, entry in entries if not math.isnan(number := _number(entry))
    ]


def _advice(value: object) -> Iterable[tuple[str, str]]:
    entries = value if isinstance(value, list) else ()
    return [(str(e.get("rule")), str(e.get("text"))) for e in entries if isinstance(e, dict)]


def _texts(value: object) -> Iterable[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else ()


# --------------------------------------------------------------------------------------------------
# Figures that follow from others of the same batch.


def add_derived(curves: Curves) -> None:
    """Add `tokens_per_s`, `zero_variance_fraction` and `durations_s` to the figures of a run."""
    values = curves.values
    seconds = durations(values["wall_s"])
    tokens = [
        completed - (0.0 if math.isnan(again) else again)
        for completed, again in zip(
            values["completion_tokens"], values["reused_tokens"], strict=True
        )
    ]
    values["durations_s"] = seconds
    values["tokens_per_s"] = _ratios(tokens, seconds)
    values["zero_variance_fraction"] = _ratios(values["zero_variance_groups"], values["groups"])


def accumulated(values: Sequence[float]) -> list[float]:
    """Return for each batch the sum up to it; NaN counts as 0."""
    return list(accumulate(0.0 if math.isnan(value) else value for value in values))


def durations(walls: Sequence[float]) -> array[float]:
    """Return the seconds between neighbouring batches, NaN where a restart set `wall_s` back."""
    gaps = [NAN, *(after - before for before, after in pairwise(walls))]
    return array("d", (gap if gap > 0 else NAN for gap in gaps[: len(walls)]))


def _ratios(upper: Sequence[float], lower: Sequence[float]) -> array[float]:
    return array("d", (a / b if b else NAN for a, b in zip(upper, lower, strict=True)))


# --------------------------------------------------------------------------------------------------
# The evaluations of a run, each at the time of the batch that it followed.


@dataclass(frozen=True, slots=True)
class EvaluationFigures:
    """The figures of one evaluation."""

    step: int
    result: HeldOut
    spent_s: float
    """Time of the learner from its first batch on, without what lay between its lives."""
    by_environment: Mapping[str, float] = field(default_factory=dict)
    """Where there are several."""

    @property
    def score(self) -> float:
        """Mean grade of its greedy answers."""
        return self.result.score


def read_evaluations(path: Path, spent_s: Mapping[int, float]) -> list[EvaluationFigures]:
    """Read the evaluations that have an answer.

    Args:
        path: `eval.jsonl` of the run.
        spent_s: Batch -> seconds of the learner until it was trained; a missing one counts as 0.
    """
    return [
        EvaluationFigures(
            step=int(number(row, "step")),
            result=result,
            spent_s=spent_s.get(int(number(row, "step")), 0.0),
            by_environment=scores_in(row),
        )
        for row in read_rows(path)
        if (result := held_out(row)) is not None
    ]


def judged_by(runs: Iterable[Sequence[EvaluationFigures]]) -> str:
    """Name the metric of the last evaluation of several runs.

    It is `score` where they differ, and `accuracy` where there is no evaluation.
    """
    titles = {evaluations[-1].result.title for evaluations in runs if evaluations}
    return common_title(titles) if titles else ACCURACY
