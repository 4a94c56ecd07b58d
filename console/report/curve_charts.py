"""Charts of figures over batches: a line for each figure, and for each run where there are some."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from learner.data.grades import ACCURACY, LOG_LIKELIHOOD, REWARD
from learner.reporting.figures import ChartLine, Plot

from .curves import EvaluationFigures, judged_by, lines_of
from .drawing import (
    Chart,
    Frame,
    Key,
    Point,
    Shape,
    Tooltip,
    buckets,
    frame_of,
    mean,
    short,
    thinned,
    unit_of,
)
from .record import ReportedRun

_Scores: TypeAlias = tuple[str, str, list[tuple[EvaluationFigures, float]]]
"""Label, style and points of a curve."""

SMOOTHING = 0.9  # share of the past in the running mean: half of it is younger than seven steps


@dataclass(frozen=True, slots=True)
class ChartCurve:
    """One line of a chart."""

    label: str
    colour: int
    dash: int
    run: ReportedRun
    line: ChartLine
    raw: Sequence[float]
    """A value for each batch."""

    @property
    def style(self) -> str:
        """Classes of the curve in the style sheet."""
        return f"c{self.colour} d{self.dash}"


def curve_charts(plots: Sequence[Plot], runs: Sequence[ReportedRun]) -> list[Chart]:
    """Draw those charts of which any of the runs has a figure."""
    return [chart for plot in plots if (chart := curve_chart(plot, runs)) is not None]


def curve_chart(plot: Plot, runs: Sequence[ReportedRun]) -> Chart | None:
    """Draw one chart; None where no run has a figure for it."""
    curves = list(_curves(plot, runs))
    places = {id(curve): thinned([float(s) for s in curve.run.curves.steps]) for curve in curves}
    thin = {id(curve): thinned(curve.raw) for curve in curves}
    frame = frame_of(
        [x for xs in places.values() for x in xs],
        [y for ys in thin.values() for y in ys],
        least=plot.least,
        most=plot.most,
    )
    if frame is None:
        return None
    chart = Chart(plot.title, plot.note, x_ticks=frame.x_ticks(), y_ticks=frame.y_ticks())
    for curve in curves:
        xs = places[id(curve)]
        raw = frame.line(zip(xs, thin[id(curve)], strict=True))
        if plot.is_noisy:
            chart.shapes.append(Shape(f"faint {curve.style}", raw))
            raw = frame.line(zip(xs, thinned(_smooth(curve.raw)), strict=True))
        chart.shapes.append(Shape(f"line {curve.style}", raw))
    chart.legend = _legend(curves)
    chart.spots = _spots(frame, curves)
    chart.summary = "; ".join(
        in_words(curve.label, _finite(curve.run.curves.steps, curve.raw)) for curve in curves
    )
    return chart


def score_chart(runs: Sequence[ReportedRun], *, over_time: bool = False) -> Chart | None:
    """Draw the score of held-out answers over batches, or over the time of the learner.

    Returns:
        The chart; None where no run was evaluated.
    """
    title = judged_by(run.evaluations for run in runs)
    return _held_out_chart(runs, title, _scores(runs), over_time=over_time)


def reward_chart(runs: Sequence[ReportedRun]) -> Chart | None:
    """Draw the reward of held-out answers; None where it is what they are judged by."""
    curves = [
        (run.name, f"c{number} d0", [(e, e.result.trained) for e in run.evaluations])
        for number, run in enumerate(runs)
        if any(e.result.reward is not None for e in run.evaluations)
    ]
    return _held_out_chart(runs, REWARD, curves, over_time=False)


def _held_out_chart(
    runs: Sequence[ReportedRun], title: str, scores: Sequence[_Scores], *, over_time: bool
) -> Chart | None:
    longest = max((e.spent_s for run in runs for e in run.evaluations), default=0.0)
    unit, seconds = unit_of(longest)

    def place(evaluation: EvaluationFigures) -> float:
        return evaluation.spent_s / seconds if over_time else float(evaluation.step)

    curves = [
        (label, style, [(place(e), value) for e, value in points])
        for label, style, points in scores
    ]
    frame = frame_of(
        [x for *_, points in curves for x, _ in points],
        [y for *_, points in curves for _, y in points],
        least=0.0,
        most=1.0 if title == ACCURACY else None,
    )
    if frame is None:
        return None
    note = "Greedy answers to the same questions each time"
    if title == LOG_LIKELIHOOD:
        note = "Minus the loss of the rows that are set aside, nats a token"
    chart = Chart(
        f"Held-out {title} over time" if over_time else f"Held-out {title}",
        f"{note}; time since the first batch." if over_time else f"{note}.",
        x_ticks=frame.x_ticks(whole=not over_time),
        y_ticks=frame.y_ticks(),
        x_label=unit if over_time else "batch",
        legend=[Key(f"line {style}", label) for label, style, _ in curves]
        if len(curves) > 1
        else [],
        summary="; ".join(in_words(label, points) for label, _, points in curves),
    )
    for label, style, points in curves:
        chart.shapes.append(Shape(f"line {style}", frame.line(points)))
        chart.shapes.append(Shape(f"dots {style}", "".join(frame.line([p]) for p in points)))
        chart.spots += [
            frame.spot((x, y), f"{label} {short(y)} at {chart.x_label} {short(x)}", reach=5)
            for x, y in points
        ]
    return chart


def in_words(label: str, points: Sequence[Point]) -> str:
    """Describe a curve by its ends and its bounds."""
    if not points:
        return f"{label}: nothing"
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    (x_first, first), (x_last, last) = points[0], points[-1]
    return (
        f"{label}: {short(first)} at {short(x_first)}, {short(last)} at {short(x_last)}, "
        f"lowest {short(lowest)}, highest {short(highest)}"
    )


def _curves(plot: Plot, runs: Sequence[ReportedRun]) -> list[ChartCurve]:
    lines = lines_of(plot)
    curves: list[ChartCurve] = []
    for number, run in enumerate(runs):
        for index, (key, line) in enumerate(lines.items()):
            raw = run.curves.values[key]
            finite = [value for value in raw if math.isfinite(value)]
            if not finite or (line.is_optional and not any(finite)):
                continue
            is_alone = len(runs) == 1
            label = line.label if is_alone else f"{run.name}, {line.label}"
            label = run.name if len(lines) == 1 and not is_alone else label
            colour, dash = (index, 0) if is_alone else (number, min(index, 2))
            curves.append(ChartCurve(label, colour, dash, run, line, raw))
    return curves


def _legend(curves: Sequence[ChartCurve]) -> list[Key]:
    """Explain colours and dashes: runs by colour where there are several, figures by dash."""
    runs = {curve.run.name: curve for curve in curves}
    figures = {curve.line.label: curve for curve in curves}
    if len(runs) == 1 or len(figures) == 1:
        keys = [Key(f"line {curve.style}", curve.label) for curve in curves]
        return keys if len(curves) > 1 else []
    return [
        *(Key(f"line c{curve.colour}", name) for name, curve in runs.items()),
        *(Key(f"line c7 d{curve.dash}", label) for label, curve in figures.items()),
    ]


def _scores(runs: Sequence[ReportedRun]) -> list[_Scores]:
    """List label, style and points: of each run, then of its environments where it is alone."""
    scores = [
        (
            run.name if len(runs) > 1 else "all",
            f"c{number} d0",
            [(e, e.score) for e in run.evaluations],
        )
        for number, run in enumerate(runs)
        if run.evaluations
    ]
    if len(runs) > 1 or not scores:
        return scores
    (run,) = runs
    for number, name in enumerate(run.evaluations[-1].by_environment, start=1):
        points = [(e, e.by_environment[name]) for e in run.evaluations if name in e.by_environment]
        scores.append((name, f"c{number % 8} d1", points))
    return scores


def _spots(frame: Frame, curves: Sequence[ChartCurve]) -> list[Tooltip]:
    """Make places that show the figures of a stretch of batches, by the longest of the runs."""
    longest = max((curve.run.curves.steps for curve in curves), key=len)
    spots: list[Tooltip] = []
    for bucket in buckets(len(longest)):
        first, last = longest[bucket.start], longest[bucket.stop - 1]
        texts = [f"batch {first}" if first == last else f"batches {first} to {last}"]
        for curve in curves:
            steps = curve.run.curves.steps
            inside = range(bisect_left(steps, first), bisect_right(steps, last))
            texts.append(f"{curve.label} {short(mean(curve.raw, inside))}")
        left, right = frame.x(first - 0.5), frame.x(last + 0.5)
        spots.append(Tooltip(left, round(max(1.0, right - left), 1), "\n".join(texts)))
    return spots


def smooth(values: list[float]) -> list[float]:
    """Return the running mean with forgetting, unbiased at its start."""
    smoothed: list[float] = []
    total = weight = 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(total / weight)
    return smoothed


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the running mean of what is finite."""
    means = iter(smooth([value for value in values if math.isfinite(value)]))
    return [next(means) if math.isfinite(value) else math.nan for value in values]


def _finite(steps: Sequence[int], values: Sequence[float]) -> list[Point]:
    return [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
