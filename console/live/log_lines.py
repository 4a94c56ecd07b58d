"""Lines of the logs of a run's processes, merged by time.

A process writes JSON lines; what others write (Redis, a traceback) is text and belongs to the
moment of the line before it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from configs.printable import printable

FIRST_READ_BYTES = 2**20  # of each log: the newest few thousand lines
READ_BYTES = 4 * 2**20
SHOWN_APART = ("timestamp", "level", "event", "role", "run", "version", "incarnation", "exception")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line."""

    timestamp: str
    """ISO 8601, UTC; empty before the first of a log."""
    process: str
    text: str
    """What a person reads."""


class Log:
    """The log of one process, read from its newest part on while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = path.stem
        self._offset: int | None = None
        self._timestamp = ""

    def read_new(self) -> list[LogLine]:
        """Return the whole lines since the last call; the first time, the newest ones."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                is_first = self._offset is None
                start = max(0, size - FIRST_READ_BYTES) if self._offset is None else self._offset
                start = 0 if start > size else start  # it was full, and begins anew
                file.seek(start)
                whole, newline, _ = file.read(READ_BYTES).rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset = start + len(whole) + len(newline)
        lines = whole.decode(errors="replace").split("\n") if newline else []
        if is_first and start:
            lines = lines[1:]  # begun before
        return [self._read(line) for line in lines]

    def _read(self, line: str) -> LogLine:
        try:
            row = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or "event" not in row:
            return LogLine(self._timestamp, self._process, printable(line))
        self._timestamp = str(row.get("timestamp", self._timestamp))
        level = str(row.get("level", "info"))
        words = ["" if level == "info" else level.upper(), str(row["event"])]
        words += [f"{key}={value}" for key, value in row.items() if key not in SHOWN_APART]
        text = printable(" ".join(filter(None, words)))
        trace = str(row.get("exception", "")).splitlines()
        return LogLine(self._timestamp, self._process, "\n".join([text, *map(printable, trace)]))


def merged(logs: list[Log]) -> list[LogLine]:
    """Read what is new in all logs, in the order of time."""
    return sorted((line for log in logs for line in log.read_new()), key=_time)


def _time(line: LogLine) -> str:
    return line.timestamp
