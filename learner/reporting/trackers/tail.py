"""The lines of a file that another process or thread appends to, renames and replaces."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path


class Tail:
    """Reads whole lines in the order of the file, and goes on where it stopped.

    A file that was renamed is read to its end before the new one of its name; one that was replaced
    is read again from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BufferedReader | None = None

    def read(self, limit: int) -> list[bytes]:
        """Return the next lines, `limit` at most; none where nothing has come."""
        lines: list[bytes] = []
        while len(lines) < limit:
            line = self._next()
            if line is None:
                break
            lines.append(line)
        return lines

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> bytes | None:
        if self._file is None and not self._open():
            return None
        assert self._file is not None
        start = self._file.tell()
        line = self._file.readline()
        if line.endswith(b"\n"):
            return line
        self._file.seek(start)  # a line that is being written
        if self._is_current():
            return None
        self.close()
        return self._next()

    def _open(self) -> bool:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            return False
        return True

    def _is_current(self) -> bool:
        """Whether the open file still has the name; so it does where nothing has it."""
        assert self._file is not None
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        mine = os.fstat(self._file.fileno())
        return os.path.samestat(there, mine)
