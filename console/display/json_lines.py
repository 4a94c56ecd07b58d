"""A reader that follows a file of JSON lines while another process writes it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from learner.reporting.samples import SampleLine

Row = dict[str, object]
"""One line of metrics, of an evaluation or of a log."""

MAX_READ_BYTES = 4 * 2**20  # of one look: bounds memory when a log has grown huge


class JsonLines:
    """Reads what was added since the last look; half-written lines wait, other text is skipped.

    A file that was replaced by another (a learner that resumes rewrites its history), or emptied (a
    log that was full), is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self.num_files = 0
        """Files there have been under this name; when it grows, what was read before is void."""

    def read_new(self) -> list[Row]:
        """Return the new lines, oldest first; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                    self.num_files += 1
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                chunk = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        whole, newline, rest = chunk.rpartition(b"\n")
        if len(rest) == MAX_READ_BYTES:  # no line of ours is so long
            whole = rest
        self._offset += len(whole) + len(newline)
        rows = [parse(line) for line in whole.splitlines() if line.startswith(b"{")]
        return [row for row in rows if row is not None]

    def skip_to_end(self) -> None:
        """Take all that is there now as read."""
        if self._path.exists():
            status = self._path.stat()
            self._inode, self._offset = status.st_ino, status.st_size


def read_rows(path: Path) -> list[Row]:
    """Read a whole file of JSON lines."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        rows = [parse(line) for line in file if line.startswith(b"{")]
    return [row for row in rows if row is not None]


def number(row: Row, *keys: str, default: float = 0.0) -> float:
    """Read a number of a line under the first of these keys that has one."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, int | float):
            return float(value)
    return default


def parse(line: bytes) -> Row | None:
    """Read a line; None if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None  # a line that a killed process began, or of another program
    return row if isinstance(row, dict) else None


# --------------------------------------------------------------------------------------------------
# The newest sampled text of a run, followed while the learner writes.

READ_BYTES = 256 * 1024  # a text of 8,000 tokens with its log-probs is a fifth of it


class NewestSample:
    """Reads the last line of `samples.jsonl` when the file has grown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._sample: SampleLine | None = None

    def look(self) -> SampleLine | None:
        """Return the newest sample; the one before where its line is damaged or too long."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_ino, status.st_size) == self._seen:
                    return self._sample
                self._seen = status.st_ino, status.st_size
                file.seek(max(0, status.st_size - READ_BYTES))
                lines = file.read(READ_BYTES).split(b"\n")
        except FileNotFoundError:
            return self._sample
        for line in reversed(lines):  # the last one may still be being written
            try:
                self._sample = msgspec.json.decode(line, type=SampleLine)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            break
        return self._sample
