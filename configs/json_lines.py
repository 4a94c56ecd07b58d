"""Files of lines, most of them JSON, that are followed while others write them.

The learner and logs write them; displays, reports and trackers follow them.
"""

from __future__ import annotations

import json
import os
from io import BufferedReader
from pathlib import Path

Row = dict[str, object]
"""One line of metrics, of an evaluation or of a log."""

MAX_READ_BYTES = 4 * 2**20  # of one look: bounds memory when a log has grown huge
MAX_LINE_BYTES = MAX_READ_BYTES  # no line of ours is so long: what is longer comes in pieces


class LineFollower:
    """Reads whole lines in the order of the file, and goes on where it stopped.

    A line that is being written waits for its end. A file that was renamed is read to its end
    before the new one of its name; one that was replaced (a learner that resumes rewrites its
    history), or emptied (a log that was full), is read from its beginning. No call returns lines of
    two files.
    """

    def __init__(self, path: Path, *, newest_bytes: int | None = None) -> None:
        """Begin at the first line.

        Args:
            path: The file; it may come later.
            newest_bytes: Bytes at the end of an existing file that are read; None = all.
        """
        self._path = path
        self._newest_bytes = newest_bytes
        self._file: BufferedReader | None = None
        self.num_files = 0
        """Files there have been under this name; when it grows, what was read before is void."""

    def __del__(self) -> None:
        self.close()

    def read(self, limit: int | None = None) -> list[bytes]:
        """Return the next lines, at most `limit` and about 4 MiB; empty if nothing has come."""
        lines: list[bytes] = []
        num_bytes = 0
        while (limit is None or len(lines) < limit) and num_bytes < MAX_READ_BYTES:
            line = self._next()
            if line is None:
                if lines or not self._go_on():
                    break
                continue
            lines.append(line)
            num_bytes += len(line)
        return lines

    def skip_to_end(self) -> None:
        """Skip everything that is in the file now."""
        if self._file is not None or self._open():
            assert self._file is not None
            self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file that is read."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> bytes | None:
        """Return the next line of the file that is open; None = there is no whole one."""
        if self._file is None:
            return None
        start = self._file.tell()
        line = self._file.readline(MAX_LINE_BYTES)
        if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
            return line
        self._file.seek(start)
        return None

    def _go_on(self) -> bool:
        """Open the file that has the name now, if it is another one or begins anew."""
        if self._file is None:
            return self._open()
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        is_same = os.path.samestat(there, os.fstat(self._file.fileno()))
        if is_same and there.st_size >= self._file.tell():
            return False
        self.close()  # what was read ahead is void too
        return self._open(is_same=is_same)

    def _open(self, *, is_same: bool = False) -> bool:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            return False
        self.num_files += not is_same
        size = os.fstat(self._file.fileno()).st_size
        if self._newest_bytes is not None and size > self._newest_bytes:
            self._file.seek(size - self._newest_bytes)
            self._file.readline()  # begun before
        self._newest_bytes = None
        return True


class JsonLinesFollower:
    """Reads the objects that were added since the last look; other text is skipped."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFollower(path)

    @property
    def num_files(self) -> int:
        """Number of files that have had this name; when it grows, earlier lines no longer count."""
        return self._lines.num_files

    def read_new(self) -> list[Row]:
        """Return the new lines, oldest first; none while there is no file."""
        rows = [parse(line) for line in self._lines.read() if line.startswith(b"{")]
        return [row for row in rows if row is not None]

    def skip_to_end(self) -> None:
        """Skip everything that is in the file now."""
        self._lines.skip_to_end()


def read_rows(path: Path) -> list[Row]:
    """Read the objects of a whole file of JSON lines, without other text; none without a file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        rows = [parse(line) for line in file if line.startswith(b"{")]
    return [row for row in rows if row is not None]


def number(row: Row, key: str, *, default: float = 0.0) -> float:
    """Read a number of a line; the default where it has none under this key."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else default


def parse(line: bytes) -> Row | None:
    """Read a line; None if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None  # a line that a killed process began, or of another program
    return row if isinstance(row, dict) else None
