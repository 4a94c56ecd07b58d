"""Lines, bands, bars and spans as SVG paths in a frame with ticks: arithmetic alone.

Reports and the pages of sweeps are drawn with it.

A chart is drawn at `WIDTH` x `HEIGHT` units and scaled by the page, so that its text stays legible
from a telephone to a wide screen. Colours are classes, which the style sheet gives a light and a
dark value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 420, 208
LEFT, RIGHT, TOP, BOTTOM = 52, 408, 10, 182
"""The frame within the chart; tick labels stand to its left and below it."""

Point = tuple[float, float]

SIGNS = {
    "band": "M1 1H21V9H1Z",
    "area": "M1 1H21V9H1Z",
    "bar": "M1 1H21V9H1Z",
    "cross": "M8 2l6 6m0 -6l-6 6",
    "end": "M11 1v8",
    "mark": "M11 0v10",
}
"""Paths of the legend for shapes that are no lines."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One path of a chart, with its style."""

    style: str
    """Classes of the style sheet, such as `line c1`."""
    path: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A grid line with its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Tooltip:
    """A place that shows a text where a pointer rests on it; by default of the frame's height."""

    x: float
    width: float
    text: str
    y: float = TOP
    height: float = BOTTOM - TOP


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of the legend."""

    style: str
    """Classes, as those of the shape that it explains."""
    label: str

    @property
    def path(self) -> str:
        """Path of the sign in the legend, of 22 x 10 units."""
        return SIGNS.get(self.style.partition(" ")[0], "M2 5H20")


@dataclass(slots=True)
class Chart:
    """One chart, ready for the template."""

    title: str
    note: str
    """One sentence on what the figure is."""
    summary: str = ""
    """The curve in words, for who cannot see it."""
    shapes: list[Shape] = field(default_factory=list)
    x_ticks: list[Tick] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    legend: list[Key] = field(default_factory=list)
    spots: list[Tooltip] = field(default_factory=list)
    x_label: str = "batch"
    bottom: float = BOTTOM


@dataclass(frozen=True, slots=True)
class Frame:
    """The mapping from values to places."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    bottom: float = BOTTOM

    def x(self, value: float) -> float:
        """Place a value on the horizontal axis."""
        return round(LEFT + (RIGHT - LEFT) * (value - self.x_low) / (self.x_high - self.x_low), 1)

    def y(self, value: float) -> float:
        """Place a value on the vertical axis."""
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(self.bottom - (self.bottom - TOP) * share, 1)

    def line(self, points: Iterable[Point]) -> str:
        """Join points; where a value is not finite the line is broken."""
        parts: list[str] = []
        pen = "M"
        for x, y in points:
            if math.isfinite(y):
                parts.append(f"{pen}{self.x(x):g} {self.y(y):g}")
                pen = "L"
            else:
                pen = "M"
        # A point alone is drawn as a dot: the ends of lines are round.
        return "".join(
            f"{part}h0" if _is_single_point(parts, i) else part for i, part in enumerate(parts)
        )

    def band(self, low: Sequence[Point], high: Sequence[Point]) -> str:
        """Fill the area between two lines over the same places; gaps are left out."""
        both = [
            (x, below, above)
            for (x, below), (_, above) in zip(low, high, strict=True)
            if math.isfinite(below) and math.isfinite(above)
        ]
        if not both:
            return ""
        there = [f"{self.x(x):g} {self.y(above):g}" for x, _, above in both]
        back = [f"{self.x(x):g} {self.y(below):g}" for x, below, _ in reversed(both)]
        return f"M{'L'.join([*there, *back])}Z"

    def bar(self, x_low: float, x_high: float, value: float) -> str:
        """Draw a bar that stands on the horizontal axis."""
        left, right = self.x(x_low), self.x(x_high)
        return f"M{left:g} {self.bottom:g}V{self.y(value):g}H{right:g}V{self.bottom:g}Z"

    def spot(self, point: Point, text: str, *, reach: int) -> Tooltip:
        """Show a text around a point."""
        x, y = self.x(point[0]) - reach, self.y(point[1]) - reach
        return Tooltip(x, 2 * reach, text, y=y, height=2 * reach)

    def x_ticks(self, *, whole: bool = True) -> list[Tick]:
        """Label the horizontal axis."""
        ticks = nice_ticks(self.x_low, self.x_high, most=6, whole=whole)
        return [Tick(self.x(value), short(value)) for value in ticks]

    def y_ticks(self) -> list[Tick]:
        """Label the vertical axis."""
        return [Tick(self.y(v), short(v)) for v in nice_ticks(self.y_low, self.y_high, most=5)]


def frame_of(
    xs: Iterable[float],
    ys: Iterable[float],
    *,
    least: float | None = None,
    most: float | None = None,
) -> Frame | None:
    """Return a frame that holds all finite values; None where there is none.

    Args:
        xs: Values of the horizontal axis.
        ys: Values of the vertical axis.
        least: A value that the vertical axis includes in any case.
        most: Another one.
    """
    x_values = [x for x in xs if math.isfinite(x)]
    y_values = [y for y in ys if math.isfinite(y)]
    if not x_values or not y_values:
        return None
    y_values += [bound for bound in (least, most) if bound is not None]
    low, high = min(y_values), max(y_values)
    room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    low = low if least is not None and low >= least else low - room
    high = high if most is not None and high <= most else high + room
    if low == high:  # both bounds are met: nothing but this one value
        low, high = low - room, high + room
    x_low, x_high = min(x_values), max(x_values)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    return Frame(x_low, x_high, low, high)


def nice_ticks(low: float, high: float, *, most: int, whole: bool = False) -> list[float]:
    """Choose round values between two ends.

    Example:
        >>> nice_ticks(0.0, 1.0, most=5)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(number * step, digits) + 0.0 for number in range(first, last + 1)]


def short(value: float) -> str:
    """Write a number for people, with about four digits.

    Example:
        >>> [short(v) for v in (0.97421, 12345.6, 0.00015, 2.0, -0.5)]
        ['0.9742', '12,346', '1.5e-4', '2', '-0.5']
    """
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:  # in the room left of a chart
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def unit_of(longest_s: float) -> tuple[str, float]:
    """Choose a unit of time for an axis: its name, and its seconds."""
    if longest_s > 3 * 3600.0:
        return "hours", 3600.0
    return ("minutes", 60.0) if longest_s > 3 * 60.0 else ("seconds", 1.0)


def _is_single_point(parts: Sequence[str], i: int) -> bool:
    """Whether no line of a path leads on from this point, which would then not be seen."""
    return parts[i].startswith("M") and (i + 1 == len(parts) or parts[i + 1].startswith("M"))


# --------------------------------------------------------------------------------------------------
# Curves of any length as at most `MOST` points: means of neighbouring batches.

MOST = 160  # points of a curve: one for every third pixel of a chart


def buckets(count: int, *, most: int = MOST) -> list[range]:
    """Divide so many batches into at most so many stretches of equal length, the last one shorter.

    Example:
        >>> buckets(3)
        [range(0, 1), range(1, 2), range(2, 3)]
    """
    width = max(1, math.ceil(count / most))
    return [range(start, min(count, start + width)) for start in range(0, count, width)]


def mean(values: Sequence[float], bucket: range) -> float:
    """Average the finite values of a stretch; NaN where there are none."""
    finite = [values[i] for i in bucket if math.isfinite(values[i])]
    return math.fsum(finite) / len(finite) if finite else math.nan


def thinned(values: Sequence[float], *, most: int = MOST) -> list[float]:
    """Average each stretch of a series, so that at most so many values are left."""
    return [mean(values, bucket) for bucket in buckets(len(values), most=most)]
