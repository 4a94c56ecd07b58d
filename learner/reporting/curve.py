"""A series in bounded memory, and as a line of characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MAX_POINTS = 512  # more than a wide terminal has columns
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"


class Curve:
    """A growing series as the means of equal stretches, of which there are at most `MAX_POINTS`.

    Example:
        >>> curve = Curve()
        >>> for value in range(600):
        ...     curve.add(value)
        >>> len(curve.points), curve.points[:2]
        (300, (0.5, 2.5))
    """

    def __init__(self, points: Sequence[float] = ()) -> None:
        self._means = list(points)
        self._stride = 1
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """Add the newest value."""
        self._open.append(value)
        if len(self._open) < self._stride:
            return
        self._means.append(mean(self._open))
        self._open.clear()
        if len(self._means) > MAX_POINTS:
            if len(self._means) % 2:
                self._open = [self._means.pop()] * self._stride
            self._means = averaged(self._means, len(self._means) // 2)
            self._stride *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """The means, oldest first; the last may be of a shorter stretch."""
        return (*self._means, *([mean(self._open)] if self._open else []))


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Draw a series from its lowest to its highest value, the oldest first.

    Args:
        values: Of the series; stretches of equal length are averaged where there is less room.
        width: Characters at most.
        ascii_only: Draw with what every terminal has.

    Example:
        >>> sparkline([0.0, 1.0, 2.0], 10)
        '▁▅█'
    """
    levels = ASCII if ascii_only else BLOCKS
    if not values or width < 1:
        return ""
    shown = averaged(values, width)
    low, high = min(shown), max(shown)
    span = high - low
    if not span:
        return levels[0] * len(shown)
    return "".join(levels[round((value - low) / span * (len(levels) - 1))] for value in shown)


def averaged(values: Sequence[float], n: int) -> list[float]:
    """Average a series over at most `n` stretches of equal length."""
    size = len(values)
    if size <= n:
        return list(values)
    ends = [at * size // n for at in range(n + 1)]
    return [mean(values[start:end]) for start, end in pairwise(ends)]


def mean(values: Sequence[float]) -> float:
    """Return the mean; there must be a value."""
    return sum(values) / len(values)
