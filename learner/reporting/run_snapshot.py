"""Run snapshot of bounded size: what the live view shows of batches and evaluations; sparklines.

The learner puts it into the store with each batch, from where brokers hand it to observers; on the
learner's machine `nyala up` and `nyala top` make the same from the run's files. Loads without
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec

from configs.errors import RecordError
from learner.data.grades import held_out

from .figures import FIGURES

# --------------------------------------------------------------------------------------------------
# A series in bounded memory, and as a line of characters.

MAX_POINTS = 512  # more than a wide terminal has columns
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"


class DownsampledSeries:
    """A growing series as the means of equal stretches, of which there are at most `MAX_POINTS`.

    Example:
        >>> curve = DownsampledSeries()
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
        values: Values of the series; neighbours are averaged where there is less room.
        width: Most characters.
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


# --------------------------------------------------------------------------------------------------
# Run snapshot: what the live view shows of a run's batches and evaluations, in bounded size.

RECENT = 20  # batches: enough to smooth single ones, few enough to follow the run
MAX_BYTES = 64 * 1024  # ten times what a run with two environments has
OF_A_BATCH = tuple(figure.key for figure in FIGURES if figure.live)
OF_THE_NEWEST = tuple(figure.key for figure in FIGURES if figure.live == "newest")
OF_AN_EVALUATION = ("step", "metric", "score", "accuracy", "reward", "environments")

Line: TypeAlias = Mapping[str, object]
"""A line of `metrics.jsonl` or `eval.jsonl`."""


class RunSnapshot:
    """The newest batches, the first and the newest evaluation, and curves of all of them."""

    def __init__(self) -> None:
        self._batches: dict[int, dict[str, object]] = {}
        self._ends: list[dict[str, object]] = []
        self.rewards = DownsampledSeries()
        """Mean sampled reward of each batch."""
        self.scores = DownsampledSeries()
        """Score of each evaluation."""

    @property
    def batches(self) -> list[dict[str, object]]:
        """The newest lines, at most `RECENT`, oldest first; only with the keys that are shown."""
        return list(self._batches.values())

    @property
    def evaluations(self) -> list[dict[str, object]]:
        """The first and the newest evaluation, or the only one."""
        return self._ends if len(self._ends) < 2 else [self._ends[0], self._ends[-1]]

    def add_batch(self, line: Line) -> None:
        """Take a line of `metrics.jsonl`."""
        for earlier in self._batches.values():
            for name in OF_THE_NEWEST:
                earlier.pop(name, None)
        self._batches[int(_number(line, "step"))] = {k: line[k] for k in OF_A_BATCH if k in line}
        if len(self._batches) > RECENT:
            del self._batches[next(iter(self._batches))]
        self.rewards.add(_number(line, "reward_mean"))

    def add_evaluation(self, line: Line) -> None:
        """Take a line of `eval.jsonl`."""
        kept = {name: line[name] for name in OF_AN_EVALUATION if name in line}
        self._ends = [*self._ends[:1], kept]
        result = held_out(line)
        self.scores.add(0.0 if result is None else result.score)

    def forget_batches(self) -> None:
        """Clear batches and their curve: a learner that resumes has taken lines back."""
        self._batches.clear()
        self.rewards = DownsampledSeries()

    def forget_evaluations(self) -> None:
        """Clear the scores of all evaluations."""
        self._ends = []
        self.scores = DownsampledSeries()

    def encode(self) -> bytes | None:
        """Write the run snapshot as JSON; None where it would have more than `MAX_BYTES`."""
        text = json.dumps(
            {
                "batches": self.batches,
                "evaluations": self.evaluations,
                "rewards": [round(value, 4) for value in self.rewards.points],
                "scores": [round(value, 4) for value in self.scores.points],
            },
            default=str,
        ).encode()
        return text if len(text) <= MAX_BYTES else None

    @classmethod
    def decode(cls, text: bytes) -> RunSnapshot:
        """Read a run snapshot from JSON.

        Raises:
            RecordError: The bytes are no run snapshot.
        """
        try:
            told = msgspec.json.decode(text, type=_SnapshotFields)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(
                "a run snapshot must be one that a learner of this release writes, got other "
                f"content ({error}); use the release of Nyala that the learner has"
            ) from None
        run_snapshot = cls()
        for batch in told.batches[-RECENT:]:
            run_snapshot.add_batch(batch)
        for evaluation in told.evaluations[-2:]:
            run_snapshot.add_evaluation(evaluation)
        run_snapshot.rewards = DownsampledSeries(told.rewards)
        run_snapshot.scores = DownsampledSeries(told.scores)
        return run_snapshot


class _SnapshotFields(msgspec.Struct):
    batches: list[dict[str, object]]
    evaluations: list[dict[str, object]]
    rewards: list[float]
    scores: list[float]


def _number(line: Line, name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
