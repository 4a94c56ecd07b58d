"""The files of kept episodes: `samples.jsonl`, and its older parts, compressed.

    append -> samples.jsonl -(16 MiB)-> samples-00001.jsonl -> samples-00001.jsonl.gz -> removed

One process writes, any number read meanwhile. Together the files stay below a number of bytes: the
oldest parts go first, but for the first of all, which has the beginning of the run. A resume
removes the lines of later steps, so that the files hold a single history and a batch that is
trained again is there once. Loads without torch.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

import msgspec

from configs import durable

from .sample_lines import SampleLine

NAME = "samples"
PART_BYTES = 16 * 2**20
MODE = 0o600
LEVEL = 6  # of gzip: 0.4 s for a part; 9 takes three times as long for 1 % less
TRIES = 5  # of opening all files, between two of which a part may be compressed or removed


_File: TypeAlias = BufferedReader | gzip.GzipFile


class _Head(msgspec.Struct):
    """What a resume has to know of a line."""

    step: int
    kind: str


class SampleFiles:
    """Appends lines, compresses what is old, and keeps all of it below `max_bytes`."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._current = folder / f"{NAME}.jsonl"
        self._max_bytes = max_bytes
        self._part_bytes = min(PART_BYTES, max_bytes // 8)

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps, and end what a killed process has begun."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.glob(f".{NAME}*.jsonl*"):
            unfinished.unlink()
        self._compress()
        self._begin()
        for path in reversed(sample_paths(self._folder)):
            lines = _lines(path)
            heads = [_head(line) for line in lines]
            kept = [
                line
                for line, head in zip(lines, heads, strict=True)
                if head is not None and head.step <= step and line.endswith(b"\n")
            ]
            if len(kept) < len(lines):
                content = b"".join(kept)
                packed = path.suffix == ".gz"
                content = gzip.compress(content, LEVEL) if packed else content
                durable.replace_file(path, content, mode=MODE)
            elif any(head is not None and head.kind == "train" for head in heads):
                return  # batches are in order, so what is older is of earlier steps

    def append(self, lines: bytes) -> None:
        """Add whole lines."""
        with self._current.open("ab") as file:
            file.write(lines)
            size = file.tell()
        if size >= self._part_bytes:
            numbers = [_number(path) for path in _parts(self._folder)]
            part = self._folder / f"{NAME}-{max(numbers, default=0) + 1:05d}.jsonl"
            self._current.rename(part)
            self._compress()
            self._begin()
            self._trim()

    def _begin(self) -> None:
        """Make the file of new lines, which only this user can read: it has people's questions."""
        self._current.touch(mode=MODE)

    def _compress(self) -> None:
        for part in sorted(self._folder.glob(f"{NAME}-*.jsonl")):
            packed = gzip.compress(part.read_bytes(), LEVEL)
            durable.replace_file(part.with_name(f"{part.name}.gz"), packed, mode=MODE)
            part.unlink()

    def _trim(self) -> None:
        """Leave room for two parts that are not compressed."""
        parts = _parts(self._folder)
        room = self._max_bytes - 2 * self._part_bytes
        sizes = {path: path.stat().st_size for path in parts}
        for path in [*parts[1:], *parts[:1]]:
            if sum(sizes.values()) <= room:
                return
            path.unlink()
            del sizes[path]


def sample_paths(folder: Path) -> list[Path]:
    """List the files of a run's samples, the oldest first."""
    current = folder / f"{NAME}.jsonl"
    return [*_parts(folder), *([current] if current.exists() else [])]


def read_samples(folder: Path) -> Iterator[SampleLine]:
    """Read all samples of a run, the oldest first, while it may be writing.

    A line that a crash or the disk damaged is left out.
    """
    for file in _open_all(folder):
        with file, suppress(EOFError, OSError, zlib.error):
            for line in file:
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    yield _LINES.decode(line)


def encoded(lines: list[SampleLine]) -> bytes:
    """Write lines as bytes."""
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


_LINES = msgspec.json.Decoder(SampleLine)
_HEADS = msgspec.json.Decoder(_Head)


def _open_all(folder: Path) -> list[_File]:
    """Open the files of one moment: none is compressed or removed in between."""
    for _ in range(TRIES):
        paths = sample_paths(folder)
        files: list[_File] = []
        with suppress(FileNotFoundError):
            files = [_opened(path) for path in paths]
        if len(files) == len(paths) and sample_paths(folder) == paths:
            return files
        for file in files:
            file.close()
    return []


def _opened(path: Path) -> _File:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _parts(folder: Path) -> list[Path]:
    """List older parts; one that is being compressed is there once."""
    found = {_number(path): path for path in sorted(folder.glob(f"{NAME}-*.jsonl"))}
    found |= {_number(path): path for path in sorted(folder.glob(f"{NAME}-*.jsonl.gz"))}
    return [found[number] for number in sorted(found)]


def _number(path: Path) -> int:
    digits = path.name.removeprefix(f"{NAME}-").partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _lines(path: Path) -> list[bytes]:
    lines: list[bytes] = []
    with _opened(path) as file, suppress(EOFError, zlib.error):
        lines.extend(file)
    return lines


def _head(line: bytes) -> _Head | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return _HEADS.decode(line)
    return None
