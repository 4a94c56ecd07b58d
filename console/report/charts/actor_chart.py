"""The chart of a run's actors: a line for each life, or their number where there are many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from console.display.figures import duration
from console.report.record.actor_lives import End, Life
from console.report.record.runs import Run

from .drawing import BOTTOM, RIGHT, TOP, Chart, Frame, Key, Point, Shape, Spot, unit_of

MAX_ROWS = 60  # lives drawn beneath each other


@dataclass(frozen=True, slots=True)
class Since:
    """The horizontal axis: time since the first of all lives began."""

    began: float
    """Unix seconds."""
    unit: str
    unit_s: float

    def place(self, time: float) -> float:
        """Return a time in units of the axis."""
        return (time - self.began) / self.unit_s

    def in_words(self, life: Life) -> str:
        """Describe a life."""
        first, last = duration(life.began - self.began), duration(life.ended - self.began)
        return f"{life.name}: {first} to {last}, {life.end}, {life.episodes:,} episodes"


def actor_chart(run: Run) -> Chart | None:
    """Draw when actors joined and died, and when a learner began another life."""
    lives = run.lives
    if not lives:
        return None
    began = min(*(life.began for life in lives), run.curves.times[0])
    newest = run.curves.times[-1]
    since = Since(began, *unit_of(newest - began))
    is_crowded = len(lives) > MAX_ROWS
    row = 6.0 if len(lives) > 12 else 14.0
    bottom = BOTTOM if is_crowded else TOP + max(40.0, row * len(lives))
    numbers = _numbers(lives, since)
    most = max(number for _, number in numbers)
    frame = Frame(0.0, max(since.place(newest), 1e-3), 0.0, most * 1.05, bottom)
    chart = Chart(
        "Actors",
        "Number of actors at work." if is_crowded else "A line for each, from its join to its end.",
        x_ticks=frame.x_ticks(whole=False),
        x_label=since.unit,
        bottom=bottom,
        summary="; ".join(since.in_words(life) for life in lives[:MAX_ROWS]),
    )
    if is_crowded:
        chart.y_ticks = frame.y_ticks()
        chart.shapes.append(Shape("line c0 d0", frame.line(numbers)))
    else:
        _draw_lives(chart, frame, lives, since, row)
    learners = _learner_lives(run)
    if learners:
        chart.legend.append(Key("mark", "the learner began again"))
    for number, time in learners:
        x = frame.x(since.place(time))
        chart.shapes.append(Shape("mark", f"M{x:g} {TOP}V{bottom:g}"))
        chart.spots.append(Spot(x - 3, 6, f"life {number} of the learner", height=bottom - TOP))
    return chart


def _draw_lives(
    chart: Chart, frame: Frame, lives: Sequence[Life], since: Since, row: float
) -> None:
    for number, life in enumerate(lives):
        y = TOP + row * (number + 0.5)
        left, right = (frame.x(since.place(t)) for t in (life.began, life.ended))
        chart.shapes.append(Shape("life c0", f"M{left:g} {y:g}H{max(right, left + 1):g}"))
        if life.end is not End.OPEN:
            style, r = ("cross", 3) if life.end is End.DIED else ("end c0", 3)
            cross = f"M{right - r:g} {y - r:g}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
            chart.shapes.append(
                Shape(style, cross if life.end is End.DIED else f"M{right:g} {y - r:g}v{2 * r}")
            )
        chart.spots.append(
            Spot(left, max(4.0, RIGHT - left), since.in_words(life), y=y - row / 2, height=row)
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


def _numbers(lives: Sequence[Life], since: Since) -> list[Point]:
    """Count the actors at work over time: time and number, a step at each change."""
    changes = [(life.began, 1) for life in lives]
    changes += [(life.ended, -1) for life in lives if life.end is not End.OPEN]
    points: list[Point] = []
    count = 0
    for time, change in sorted(changes):
        points.append((since.place(time), float(count)))
        count += change
        points.append((since.place(time), float(count)))
    return points
