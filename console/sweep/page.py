"""`sweep.html`: the runs of a sweep as a table, their curves, and their score over each setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from configs import durable
from console.report.drawing import Chart, Key, Shape, Tick, frame_of, short
from console.report.write import page_templates
from learner.data.grades import common_title

from .grid import Axis, SweepRunProgress, ranked
from .study import NUMBER

PAGE = Path(__file__).parent / "page"
COLOURS = 8
LABELS = 6  # of an axis: more would touch each other


def write_sweep(
    path: Path, name: str, axes: Sequence[Axis], outcomes: Sequence[SweepRunProgress]
) -> Path:
    """Write the page of a sweep to `path` and return that; an earlier page is replaced."""
    order = ranked(outcomes)
    charts = [_curves(order), *(_scores(axis, order) for axis in axes)]
    text = (
        page_templates(PAGE)
        .get_template("sweep.html.jinja")
        .render(
            title=name,
            charts=[chart for chart in charts if chart is not None],
            rows=[outcome.row() for outcome in order],
        )
    )
    durable.replace_file(path, text)
    return path


def _curves(outcomes: Sequence[SweepRunProgress]) -> Chart | None:
    """Draw the held-out score of all runs; colours are used again beyond eight."""
    places = [place for outcome in outcomes for place in outcome.scores]
    frame = frame_of([x for x, _ in places], [y for _, y in places], least=0.0, most=1.0)
    if frame is None:
        return None
    chart = Chart(
        f"Held-out {_title(outcomes)}",
        "Scores of each run, the best first.",
        x_ticks=frame.x_ticks(),
        y_ticks=frame.y_ticks(),
    )
    for number, outcome in enumerate(outcomes):
        style = f"c{number % COLOURS} d{min(number // COLOURS, 2)}"
        chart.shapes.append(Shape(f"line {style}", frame.line(outcome.scores)))
        chart.legend.append(Key(f"line {style}", _label(outcome)))
        chart.spots += [
            frame.spot((x, y), f"{_label(outcome)}: {short(y)} after {x:.0f} batches", reach=5)
            for x, y in outcome.scores
        ]
    chart.summary = "; ".join(
        f"{_label(outcome)}: {short(outcome.held_out)}" for outcome in outcomes
    )
    return chart


def _scores(axis: Axis, outcomes: Sequence[SweepRunProgress]) -> Chart | None:
    """Draw the last score (the reward where there is none) of all runs over one setting."""
    has_score = any(math.isfinite(outcome.held_out) for outcome in outcomes)
    scores = [(outcome, outcome.held_out if has_score else outcome.reward) for outcome in outcomes]
    finite = [(outcome, score) for outcome, score in scores if math.isfinite(score)]
    values = _ordered({outcome.point.values[axis.path] for outcome, _ in finite})
    frame = frame_of([-0.5, len(values) - 0.5], [score for _, score in finite], least=0.0)
    if frame is None:
        return None
    step = math.ceil(len(values) / LABELS)
    what = f"Held-out {_title(outcomes)}" if has_score else "Reward"
    chart = Chart(
        f"{what} by {axis.path}",
        "A dot for each run, at its end.",
        y_ticks=frame.y_ticks(),
        x_ticks=[Tick(frame.x(i), value) for i, value in enumerate(values) if i % step == 0],
        x_label="",
    )
    for outcome, score in finite:
        x = float(values.index(outcome.point.values[axis.path]))
        chart.shapes.append(Shape("dots c0 d0", frame.line([(x, score)])))
        chart.spots.append(frame.spot((x, score), f"{_label(outcome)}: {short(score)}", reach=6))
    chart.summary = "; ".join(f"{_label(outcome)}: {short(score)}" for outcome, score in finite)
    return chart


def _title(outcomes: Sequence[SweepRunProgress]) -> str:
    return common_title(outcome.judged_by for outcome in outcomes if outcome.scores)


def _ordered(values: set[str]) -> list[str]:
    """Sort values: by size if all are numbers."""
    if all(NUMBER.fullmatch(value) for value in values):
        return sorted(values, key=float)
    return sorted(values)


def _label(outcome: SweepRunProgress) -> str:
    return ", ".join(f"{path} {value}" for path, value in outcome.point.values.items())
