"""Following a file of JSON lines that another process writes."""

from __future__ import annotations

import json
from pathlib import Path

Row = dict[str, object]
"""One line of metrics, of an evaluation or of a log."""

MAX_READ_BYTES = 4 * 2**20  # of one look: bounds memory when a log has grown huge


class JsonLines:
    """Reads what was added since the last look; half-written lines wait, other text is skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Row]:
        """Return the new lines, oldest first; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        whole, newline, _ = chunk.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        rows = [_parse(line) for line in whole.splitlines() if line.startswith(b"{")]
        return [row for row in rows if row is not None]


def read_rows(path: Path) -> list[Row]:
    """Read a whole file of JSON lines."""
    follower, rows = JsonLines(path), []
    while new := follower.read_new():
        rows += new
    return rows


def number(row: Row, key: str, default: float = 0.0) -> float:
    """Read a number of a line; one that is absent or no number is the default."""
    value = row.get(key, default)
    return float(value) if isinstance(value, int | float) else default


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # a line that a killed process began
    return row if isinstance(row, dict) else None
