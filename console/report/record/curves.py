"""Figures of a run by batch, read from `metrics.jsonl` line by line.

Of each line only the figures that a report draws are held, as machine numbers: a run of a hundred
thousand batches takes some 45 MB. A batch that is there twice counts as its later line, and what
was trained after it in an abandoned branch is gone, as the learner's own rewind does it.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from console.display.json_lines import number

MAX_ACTORS = 4096  # incarnations remembered: of a fleet of spot machines the newest come and go

NAN = math.nan


@dataclass(slots=True)
class Presence:
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
    actors: dict[str, Presence] = field(default_factory=dict)
    alerts: Counter[str] = field(default_factory=Counter)
    """Alert of the guards -> batches that had it."""
    alerts_at: dict[str, int] = field(default_factory=dict)
    """Alert -> its newest batch."""
    advice: dict[str, str] = field(default_factory=dict)
    """Rule of the advisor -> its newest advice."""
    advice_at: dict[str, int] = field(default_factory=dict)
    """Rule -> the newest batch whose line had it."""

    def finite(self, key: str) -> list[tuple[int, float]]:
        """List batch and value where a figure has one."""
        values = self.values.get(key, array("d"))
        return [(s, v) for s, v in zip(self.steps, values, strict=False) if math.isfinite(v)]


def read_curves(path: Path, keys: Sequence[str]) -> Curves:
    """Read the figures of a run; none while it has trained no batch.

    Args:
        path: Its `metrics.jsonl`, which the learner may be writing.
        keys: Figures to hold.
    """
    curves = Curves(values={key: array("d") for key in keys})
    for row in _rows(path):
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        _rewind(curves, step)
        curves.steps.append(step)
        curves.times.append(number(row, "time", "wall_s"))
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
    """Add what a batch has of lags, actors, alerts and advice."""
    for lag, tokens in _table(row.get("policy_lag_histogram")):
        if lag.isdecimal():
            curves.lags[int(lag)] += int(tokens)
    for actor, episodes in _table(row.get("episodes_by_actor")):
        if actor in curves.actors or len(curves.actors) < MAX_ACTORS:
            presence = curves.actors.setdefault(actor, Presence(step, step))
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
    found = row.get(table)
    if not dot:
        return found
    return found.get(name) if isinstance(found, dict) else None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NAN
    return float(value)


def _table(value: object) -> Iterable[tuple[str, float]]:
    entries = value.items() if isinstance(value, dict) else ()
    return [
        (str(name), number) for name, each in entries if not math.isnan(number := _number(each))
    ]


def _advice(value: object) -> Iterable[tuple[str, str]]:
    entries = value if isinstance(value, list) else ()
    return [(str(e.get("rule")), str(e.get("text"))) for e in entries if isinstance(e, dict)]


def _texts(value: object) -> Iterable[str]:
    return [str(each) for each in value] if isinstance(value, list) else ()
