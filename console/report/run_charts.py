"""Charts of one run each: lives of its actors, spread of ratios and lags, the learner's time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from console.display.snapshot import duration
from learner.reporting.figures import TIME
from learner.training import ratio_bins

from .curves import PERCENTILES, lines_of
from .drawing import (
    BOTTOM,
    RIGHT,
    TOP,
    Chart,
    Frame,
    Key,
    Point,
    Shape,
    Tick,
    Tooltip,
    buckets,
    frame_of,
    mean,
    short,
    thinned,
    unit_of,
)
from .record import ActorIncarnation, IncarnationEnd, ReportedRun

# --------------------------------------------------------------------------------------------------
# The chart of a run's actors: a line for each life, or their number where there are many.

MAX_ROWS = 60  # lives drawn beneath each other


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The horizontal axis: time since the first life of the run began."""

    began: float
    """Unix seconds."""
    unit: str
    unit_s: float

    def place(self, time: float) -> float:
        """Return a time in units of the axis."""
        return (time - self.began) / self.unit_s

    def in_words(self, life: ActorIncarnation) -> str:
        """Describe an actor's life in one line."""
        first, last = duration(life.began - self.began), duration(life.ended - self.began)
        return f"{life.name}: {first} to {last}, {life.end}, {life.episodes:,} episodes"


def actor_chart(run: ReportedRun) -> Chart | None:
    """Draw when actors joined and died, and when a learner began another life.

    With more than 60 lives it draws the number of actors over time. None where no actor is known.
    """
    lives = run.lives
    if not lives:
        return None
    began = min(*(life.began for life in lives), run.curves.times[0])
    newest = run.curves.times[-1]
    since = TimeAxis(began, *unit_of(newest - began))
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
        chart.spots.append(Tooltip(x - 3, 6, f"life {number} of the learner", height=bottom - TOP))
    return chart


def _draw_lives(
    chart: Chart, frame: Frame, lives: Sequence[ActorIncarnation], since: TimeAxis, row: float
) -> None:
    for number, life in enumerate(lives):
        y = TOP + row * (number + 0.5)
        left, right = (frame.x(since.place(t)) for t in (life.began, life.ended))
        chart.shapes.append(Shape("life c0", f"M{left:g} {y:g}H{max(right, left + 1):g}"))
        if life.end is not IncarnationEnd.OPEN:
            style, r = ("cross", 3) if life.end is IncarnationEnd.DIED else ("end c0", 3)
            cross = f"M{right - r:g} {y - r:g}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
            chart.shapes.append(
                Shape(
                    style,
                    cross if life.end is IncarnationEnd.DIED else f"M{right:g} {y - r:g}v{2 * r}",
                )
            )
        chart.spots.append(
            Tooltip(left, max(4.0, RIGHT - left), since.in_words(life), y=y - row / 2, height=row)
        )
    chart.legend = [Key("life c0", "at work")]
    if any(life.end is IncarnationEnd.DIED for life in lives):
        chart.legend.append(Key("cross", "died or fell silent"))
    if any(life.end is IncarnationEnd.LEFT for life in lives):
        chart.legend.append(Key("end c0", "drained and left"))


def _learner_lives(run: ReportedRun) -> list[tuple[int, float]]:
    """List the later lives of the learner and when each trained its first batch."""
    lineages, times = run.curves.values["lineage"], run.curves.times
    return [
        (int(lineages[i]), times[i])
        for i in range(1, len(lineages))
        if math.isfinite(lineages[i]) and lineages[i] != lineages[i - 1]
    ]


def _numbers(lives: Sequence[ActorIncarnation], since: TimeAxis) -> list[Point]:
    """Count the live actors over time: time and number, a step at each change."""
    changes = [(life.began, 1) for life in lives]
    changes += [(life.ended, -1) for life in lives if life.end is not IncarnationEnd.OPEN]
    points: list[Point] = []
    count = 0
    for time, change in sorted(changes):
        points.append((since.place(time), float(count)))
        count += change
        points.append((since.place(time), float(count)))
    return points


# --------------------------------------------------------------------------------------------------
# Charts of one run each: the spread of its ratios and lags, and where the learner's time goes.

MAX_BARS = 24
QUARTER = 4  # early and late batches of a run are its first and its last quarter
BAR = 0.42  # of the width of a bin, which has an early one and a late one
LABELLED = ("-1", "-0.1", "-0.01", "0", "0.01", "0.1", "1")  # edges of bins, and the middle
ZERO = ratio_bins.NAMES.index("0")
FAR = 0.1  # nats: half of a usual clip bound
STRETCHES = 40  # of the learner's time: shares of single batches jump too much to be read


def ratio_chart(run: ReportedRun) -> Chart | None:
    """Draw the spread of importance ratios over batches; None where no ratio was recorded."""
    xs = thinned([float(step) for step in run.curves.steps])
    raw = {p: run.curves.values[f"ratio_percentiles.{p}"] for p in PERCENTILES}
    lines = {p: list(zip(xs, thinned(values), strict=True)) for p, values in raw.items()}
    ys = [y for points in lines.values() for _, y in points]
    frame = frame_of(xs, ys, least=1.0, most=1.0)
    if frame is None:
        return None
    chart = Chart(
        "Importance ratios",
        "Trained over sampling policy, by token; 1 = the same policy.",
        x_ticks=frame.x_ticks(),
        y_ticks=frame.y_ticks(),
        legend=[
            Key("line c0 d0", "median"),
            Key("band b3", "middle 50 %"),
            Key("band b2", "90 %"),
            Key("band b1", "98 %"),
        ],
    )
    for style, low, high in (("b1", "1", "99"), ("b2", "5", "95"), ("b3", "25", "75")):
        chart.shapes.append(Shape(f"band {style}", frame.band(lines[low], lines[high])))
    chart.shapes.append(Shape("line c0 d0", frame.line(lines["50"])))
    lowest = min(filter(math.isfinite, raw["1"]), default=math.nan)
    highest = max(filter(math.isfinite, raw["99"]), default=math.nan)
    chart.summary = (
        f"1st percentile at least {short(lowest)}, 99th percentile at most {short(highest)}"
    )
    steps = run.curves.steps
    for bucket in buckets(len(steps)):
        values = ", ".join(f"{p} %: {short(mean(raw[p], bucket))}" for p in PERCENTILES)
        left, width = _stretch(frame, steps[bucket.start], steps[bucket.stop - 1])
        chart.spots.append(Tooltip(left, width, f"batch {steps[bucket.start]}\n{values}"))
    return chart


def ratio_histogram(run: ReportedRun) -> Chart | None:
    """Draw the spread of the log-ratios in the first and in the last quarter of the batches.

    None after one batch alone, and where no ratio was recorded.
    """
    steps = run.curves.steps
    quarter = max(1, len(steps) // QUARTER)
    early, late = range(quarter), range(len(steps) - quarter, len(steps))
    shares = [_shares_of_bins(run, part) for part in (early, late)]
    if early == late or not all(map(any, shares)):
        return None
    frame = Frame(-0.5, len(ratio_bins.NAMES) - 0.5, 0.0, max(map(max, shares)) * 1.04)
    chart = Chart(
        "Importance ratios, early and late",
        "Share of tokens by the log of the ratio, nats: 0.1 is a ratio of 1.11, and 1 of 2.72.",
        x_ticks=[
            Tick(frame.x(_nearer_to_zero(i)), name)
            for i, name in enumerate(ratio_bins.NAMES)
            if name in LABELLED
        ],
        y_ticks=frame.y_ticks(),
        x_label="log ratio",
    )
    names = [f"batches {steps[part.start]:,} to {steps[part.stop - 1]:,}" for part in (early, late)]
    for colour, (name, heights) in enumerate(zip(names, shares, strict=True)):
        chart.legend.append(Key(f"bar c{colour}", name))
        for i, height in enumerate(heights):
            left = i + BAR * (colour - 1)
            chart.shapes.append(Shape(f"bar c{colour}", frame.bar(left, left + BAR, height)))
    for i, of_bin in enumerate(zip(*shares, strict=True)):
        texts = [f"{name}: {share:.1%}" for name, share in zip(names, of_bin, strict=True)]
        left, width = _stretch(frame, i, i)
        chart.spots.append(Tooltip(left, width, "\n".join([_bin_in_words(i), *texts])))
    chart.summary = "; ".join(
        f"{name}: {heights[ZERO]:.1%} within {ratio_bins.EDGES[ZERO]:g} of 0, "
        f"{_share_beyond(FAR, heights):.1%} beyond {FAR:g}"
        for name, heights in zip(names, shares, strict=True)
    )
    return chart


def _nearer_to_zero(i: int) -> float:
    """Return the edge that names a bin: the one nearer to 0, or the middle of the bin around 0."""
    return i + 0.5 * ((i < ZERO) - (i > ZERO))


def _shares_of_bins(run: ReportedRun, part: range) -> list[float]:
    """Return the share of these batches' tokens in each bin; zeros where none was counted."""
    counts = [run.curves.values[f"log_ratio_histogram.{name}"] for name in ratio_bins.NAMES]
    sums = [_total(counted[part.start : part.stop]) for counted in counts]
    return [total / (sum(sums) or 1.0) for total in sums]


def _share_beyond(size: float, shares: Sequence[float]) -> float:
    """Sum the shares of bins whose log-ratio is at least so far from 0."""
    return math.fsum(
        share
        for name, share in zip(ratio_bins.NAMES, shares, strict=True)
        if abs(float(name)) >= size
    )


def _bin_in_words(i: int) -> str:
    edges = [f"{edge:g}" for edge in ratio_bins.EDGES]
    if i == 0:
        return f"log ratio below {edges[0]}"
    if i == len(edges):
        return f"log ratio above {edges[-1]}"
    return f"log ratio {edges[i - 1]} to {edges[i]}"


def lag_chart(run: ReportedRun) -> Chart | None:
    """Draw the lags of all trained tokens as a histogram; None where no lag was recorded."""
    total = sum(run.curves.lags.values())
    if not total:
        return None
    largest = max(run.curves.lags)
    width = math.ceil((largest + 1) / MAX_BARS)
    shares = [
        sum(run.curves.lags[lag] for lag in range(start, start + width)) / total
        for start in range(0, largest + 1, width)
    ]
    frame = Frame(-0.5, len(shares) - 0.5, 0.0, max(shares) * 1.04)
    chart = Chart(
        "Policy lag of trained tokens",
        "Share of all tokens by the age of the policy that sampled them, batches.",
        y_ticks=frame.y_ticks(),
        x_label="lag",
    )
    names = [str(i * width) if width == 1 else f"{i * width}+" for i in range(len(shares))]
    spacing = math.ceil(len(names) / 8)
    chart.x_ticks = [Tick(frame.x(i), name) for i, name in enumerate(names) if i % spacing == 0]
    for i, share in enumerate(shares):
        chart.shapes.append(Shape("bar c0", frame.bar(i - 0.4, i + 0.4, share)))
        left, wide = _stretch(frame, i, i)
        chart.spots.append(Tooltip(left, wide, f"lag {names[i]}: {share:.1%} of tokens"))
    chart.summary = ", ".join(f"{name}: {s:.1%}" for name, s in zip(names, shares, strict=True))
    return chart


def phase_chart(run: ReportedRun) -> Chart | None:
    """Draw the share of each phase in the learner's time, over stretches of batches.

    The first batch is left out: it waits for actors to start. None where no time was recorded.
    """
    values, steps = run.curves.values, run.curves.steps[1:]  # the first waits for actors to start
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for key, line in lines_of(TIME).items():
        keys[line.label].append(key)
    spent = {
        name: [_total([values[key][i] for key in members]) for i in range(1, len(steps) + 1)]
        for name, members in keys.items()
    }
    stretches = buckets(len(steps), most=STRETCHES)
    seconds = {name: thinned(batches, most=STRETCHES) for name, batches in spent.items()}
    totals = [_total([of_phase[i] for of_phase in seconds.values()]) for i in range(len(stretches))]
    if not any(totals):
        return None
    xs = thinned([float(step) for step in steps], most=STRETCHES)
    frame = frame_of(xs, [0.0, 100.0], least=0.0, most=100.0)
    assert frame is not None, "there are batches"
    chart = Chart(
        TIME.title,
        TIME.note,
        x_ticks=frame.x_ticks(),
        y_ticks=frame.y_ticks(),
    )
    below = [0.0] * len(xs)
    for colour, (name, of_phase) in enumerate(seconds.items()):
        shares = [
            100 * part / all_ if all_ else 0.0 for part, all_ in zip(of_phase, totals, strict=True)
        ]
        above = [low + share for low, share in zip(below, shares, strict=True)]
        low_line, high_line = zip(xs, below, strict=True), zip(xs, above, strict=True)
        chart.shapes.append(Shape(f"area c{colour}", frame.band(list(low_line), list(high_line))))
        chart.legend.append(Key(f"area c{colour}", name))
        below = above
    whole = sum(totals)
    shares_of_all = {name: sum(of_phase) / whole for name, of_phase in seconds.items()}
    chart.summary = ", ".join(f"{name} {share:.1%}" for name, share in shares_of_all.items())
    for i, bucket in enumerate(stretches):
        texts = [f"{name} {short(of_phase[i])} s" for name, of_phase in seconds.items()]
        left, width = _stretch(frame, steps[bucket.start], steps[bucket.stop - 1])
        chart.spots.append(
            Tooltip(left, width, "\n".join([f"batch {steps[bucket.start]}", *texts]))
        )
    return chart


def _stretch(frame: Frame, first: float, last: float) -> tuple[float, float]:
    """Return left end and width of a bar from one place of the axis to another."""
    left, right = frame.x(first - 0.5), frame.x(last + 0.5)
    return left, round(max(1.0, right - left), 1)


def _total(values: Sequence[float]) -> float:
    return sum(value for value in values if math.isfinite(value))
