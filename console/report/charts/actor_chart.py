"""The chart of a run's actors: a line for each life, or their number where there are many."""

from __future__ import annotations

import math
from collections.abc import Sequence

from console.report.record.actor_lives import End, Life
from console.report.record.runs import Run

from .drawing import BOTTOM, RIGHT, TOP, Chart, Frame, Key, Point, Shape, Spot

MAX_ROWS = 60  # lives drawn beneath each other
MINUTE_S = 60.0


def actor_chart(run: Run) -> Chart | None:
    """Draw when actors joined and died, and when a learner began another life."""
    lives = run.lives
    if not lives:
        return None
    began = min(*(life.began for life in lives), run.curves.times[0])
    newest = run.curves.times[-1]
    is_crowded = len(lives) > MAX_ROWS
    row = 6.0 if len(lives) > 12 else 14.0
    bottom = BOTTOM if is_crowded else TOP + max(40.0, row * len(lives))
    numbers = _numbers(lives, began)
    most = max(number for _, number in numbers)
    frame = Frame(0.0, max((newest - began) / MINUTE_S, 1e-3), 0.0, most * 1.05, bottom)
    chart = Chart(
        "Actors",
        "Number of actors at work." if is_crowded else "A line for each, from its join to its end.",
        x_ticks=frame.x_ticks(whole=False),
        x_label="minutes",
        bottom=bottom,
        summary="; ".join(_in_words(life, began) for life in lives[:MAX_ROWS]),
    )
    if is_crowded:
        chart.y_ticks = frame.y_ticks()
        chart.shapes.append(Shape("line c0 d0", frame.line(numbers)))
    else:
        _draw_lives(chart, frame, lives, began, row)
    for number, time in _learner_lives(run):
        x = frame.x((time - began) / MINUTE_S)
        chart.shapes.append(Shape("mark", f"M{x:g} {TOP}V{bottom:g}"))
        chart.spots.append(Spot(x - 3, 6, f"life {number} of the learner", height=bottom - TOP))
    return chart


def _draw_lives(
    chart: Chart, frame: Frame, lives: Sequence[Life], began: float, row: float
) -> None:
    for number, life in enumerate(lives):
        y = TOP + row * (number + 0.5)
        left, right = (frame.x((t - began) / MINUTE_S) for t in (life.began, life.ended))
        chart.shapes.append(Shape("life c0", f"M{left:g} {y:g}H{max(right, left + 1):g}"))
        if life.end is not End.OPEN:
            style, r = ("cross", 3) if life.end is End.DIED else ("end c0", 3)
            cross = f"M{right - r:g} {y - r:g}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
            chart.shapes.append(
                Shape(style, cross if life.end is End.DIED else f"M{right:g} {y - r:g}v{2 * r}")
            )
        chart.spots.append(
            Spot(left, max(4.0, RIGHT - left), _in_words(life, began), y=y - row / 2, height=row)
        )
    chart.legend = [Key("life c0", "at work")]
    if any(life.end is End.DIED for life in lives):
        chart.legend.append(Key("cross", "died or fell silent"))
    if any(life.end is End.LEFT for life in lives):
        chart.legend.append(Key("end c0", "drained and left"))


def _learner_lives(run: Run) -> list[tuple[int, float]]:
    """List the later lives of the learner and when each trained its first batch."""
    lineages, times = run.curves.values["lineage"], run.curves.times
    return [
        (int(lineages[i]), times[i])
        for i in range(1, len(lineages))
        if math.isfinite(lineages[i]) and lineages[i] != lineages[i - 1]
    ]


def _in_words(life: Life, began: float) -> str:
    first, last = (life.began - began) / MINUTE_S, (life.ended - began) / MINUTE_S
    return f"{life.name}: minute {first:.1f} to {last:.1f}, {life.end}, {life.episodes:,} episodes"


def _numbers(lives: Sequence[Life], began: float) -> list[Point]:
    """Count the actors at work over time: minute and number, a step at each change."""
    changes = [(life.began, 1) for life in lives]
    changes += [(life.ended, -1) for life in lives if life.end is not End.OPEN]
    points: list[Point] = []
    count = 0
    for time, change in sorted(changes):
        points.append(((time - began) / MINUTE_S, float(count)))
        count += change
        points.append(((time - began) / MINUTE_S, float(count)))
    return points
