"""The log of a process, bounded: two files, of which the older is replaced when the newer is full.

The process appends to a file that it holds itself, so that it goes on without us. A full file is
therefore copied, then emptied: what is written in between is lost, a line or two of each 16 MiB.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 16 * 2**20  # of each of the two: weeks of a healthy process


class ProcessLog:
    """A log and the one before it, `<name>.log.1`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> BinaryIO:
        """Open the file for a new life of the process: every write goes to its end."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.trim()
        return self._path.open("ab")

    def trim(self) -> None:
        """Begin anew if the file is full; called often, as only this bounds it."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size <= MAX_LOG_BYTES:
            return
        older = self._path.with_name(f"{self._path.name}.1")
        # A full disk keeps no older part; emptying the file is then all the more useful.
        with suppress(OSError), self._path.open("rb") as full, older.open("wb") as copy:
            full.seek(-MAX_LOG_BYTES, os.SEEK_END)
            copy.write(full.read(MAX_LOG_BYTES))  # and not what is written meanwhile
        with suppress(FileNotFoundError):
            os.truncate(self._path, 0)
