"""Stages of each process while it starts with their seconds, and its newest error, from its log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from .json_lines import JsonLines, Row, parse

TAIL_BYTES = 64 * 1024  # of a log: stages are logged while there is little else


@dataclass(frozen=True, slots=True)
class Stage:
    """What a process was doing."""

    name: str
    at: float
    """When it began, Unix time."""


class Stages:
    """Follows the logs for lines with the key `stage`, and for the newest error."""

    def __init__(self, logs: Mapping[str, Path], *, clock: Callable[[], float] = time.time) -> None:
        # Logs of an earlier life are not read again: only what this `nyala up` causes is news.
        self._logs = {name: JsonLines(path) for name, path in logs.items()}
        for follower in self._logs.values():
            follower.skip_to_end()
        self._stages = dict.fromkeys(logs, "starting")
        self._errors: dict[str, str] = {}
        self._clock = clock
        self._began = clock()
        # Until `report`: the stages of what is started again later would only take memory.
        self._begun: dict[str, list[tuple[str, float]]] | None = {
            name: [("starting", self._began)] for name in logs
        }

    def look(self) -> Mapping[str, str]:
        """Return process name -> stage."""
        for name, follower in self._logs.items():
            for row in follower.read_new():
                if "stage" in row:
                    self._stages[name] = str(row["stage"])
                    if self._begun is not None:
                        self._begun[name].append((str(row["stage"]), self._time(row)))
                if row.get("level") in {"error", "critical"}:
                    self._errors[name] = str(row.get("event", ""))
        return self._stages

    @property
    def elapsed_s(self) -> float:
        """Time since the beginning."""
        return max(0.0, self._clock() - self._began)

    def report(self) -> list[str]:
        """Return the time since the beginning, then each process's stages; once, empty later."""
        self.look()
        begun, self._begun = self._begun, None
        if begun is None:
            return []
        now = self._clock()
        lines = [f"first batch after {now - self._began:.1f} s"]
        for name, stages in begun.items():
            spans = pairwise([*stages, ("", now)])
            spent = [f"{stage} {max(0.0, end - start):.1f} s" for (stage, start), (_, end) in spans]
            lines.append(f"{name}: {', '.join(spent)}")
        return lines

    def take_error(self, name: str) -> str | None:
        """Return the newest error that a process wrote since the last call."""
        self.look()
        return self._errors.pop(name, None)

    def _time(self, row: Row) -> float:
        return _time(row) or self._clock()


def newest_stage(log: Path) -> Stage | None:
    """Read the newest stage in the end of a log; None if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).split(b"\n")
    for line in reversed(lines):
        if b'"stage"' in line and (row := parse(line)) is not None and "stage" in row:
            return Stage(str(row["stage"]), _time(row) or 0.0)
    return None


def _time(row: Row) -> float | None:
    try:
        return datetime.fromisoformat(str(row.get("timestamp"))).timestamp()
    except ValueError:
        return None
