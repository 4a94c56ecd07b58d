"""The newest sampled text of a run, followed while the learner writes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from learner.reporting.sample_lines import SampleLine

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
