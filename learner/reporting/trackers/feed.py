"""The part of a run that a tracker has not got yet, read from the run's files.

The files are the queue: they are written whether trackers keep up or not, so that a tracker that
was away gets everything later, and nothing waits in memory. A step that was sent is not sent again:
a learner that resumes trains the batches behind its checkpoint once more, with the same groups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from configs.json_lines import LineFollower
from learner.reporting.samples import NAME as SAMPLES
from learner.reporting.samples import SampleLine

from .names import Line, batch_figures, evaluation_figures
from .tracker import SampleTable, TrackedFigures

LINES = 64  # read at a time
MAX_ROWS = 256  # of a table: a batch of 32 groups of 8
MAX_TEXT = 2000  # characters of a prompt or an answer; the middle of a longer one is left out
QUIET_BATCHES = 2
"""A table is complete once so many batches have passed without a further row of it."""
COLUMNS = (
    "step", "environment", "group", "task", "sample", "prompt", "completion", "reward", "parts",
    "finish", "tokens", "actor",
)  # fmt: skip


class Feed:
    """Reads the figures and tables that are newer than what a tracker has."""

    def __init__(self, folder: Path, sent: Mapping[str, int]) -> None:
        """Begin after the entries that have been sent.

        Args:
            folder: Folder of the run.
            sent: `batches`, `evaluations`, `samples/train` or `samples/eval` -> last step.
        """
        self._sent = dict(sent)
        self._passed: set[tuple[str, int]] = set()
        """Streams and steps of this life; evaluations may end in another order than they began."""
        self._batches = LineFollower(folder / "metrics.jsonl")
        self._evaluations = LineFollower(folder / "eval.jsonl")
        self._samples = LineFollower(folder / f"{SAMPLES}.jsonl")
        self._tables: dict[str, _OpenTable] = {}
        self._step = 0
        self._time = time.time()

    def points(self, limit: int) -> tuple[str, list[TrackedFigures]]:
        """Return the next figures, of batches or of evaluations; none where nothing is new."""
        batches = self._new_lines("batches", self._batches, limit)
        if batches:
            points = []
            for step, line in batches:
                self._step, self._time = step, _unix_time(line, self._time)
                points.append(TrackedFigures(step, self._time, batch_figures(line)))
            return "batches", points
        evaluations = self._new_lines("evaluations", self._evaluations, limit)
        return "evaluations", [
            TrackedFigures(step, self._time, evaluation_figures(line)) for step, line in evaluations
        ]

    def tables(self, *, is_ended: bool) -> list[SampleTable]:
        """Return the tables that are complete; at the end of the run, all.

        Rows of a table beyond `MAX_ROWS` are left out, and so is the middle of long texts.
        """
        complete: list[SampleTable] = []
        while lines := self._samples.read(LINES):
            for text in lines:
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    complete += self._add(_LINES.decode(text))
        for name, table in list(self._tables.items()):
            if is_ended or self._step >= table.batch + QUIET_BATCHES:
                complete += self._closed(name)
        return complete

    def close(self) -> None:
        """Close the files that are followed."""
        for tail in (self._batches, self._evaluations, self._samples):
            tail.close()

    def _new_lines(self, stream: str, tail: LineFollower, limit: int) -> list[tuple[int, Line]]:
        new: list[tuple[int, Line]] = []
        while len(new) < limit and (lines := tail.read(limit - len(new))):
            for text in lines:
                step, line = _parsed(text)
                if self._is_new(stream, step):
                    self._passed.add((stream, step))
                    new.append((step, line))
        return new

    def _is_new(self, stream: str, step: int) -> bool:
        return step > self._sent.get(stream, -1) and (stream, step) not in self._passed

    def _add(self, line: SampleLine) -> list[SampleTable]:
        name = f"{SAMPLES}/{line.kind}"
        if not self._is_new(name, line.step):
            return []
        table, closed = self._tables.get(name), []
        if table is not None and table.step != line.step:
            closed, table = self._closed(name), None
        if table is None:
            table = self._tables[name] = _OpenTable(line.step)
        table.add(line, batch=self._step)
        return closed

    def _closed(self, name: str) -> list[SampleTable]:
        table = self._tables.pop(name)
        self._passed.add((name, table.step))
        return [SampleTable(name, table.step, table.time, COLUMNS, table.rows)]


class _OpenTable:
    """A table whose rows are still being written."""

    def __init__(self, step: int) -> None:
        self.step, self.batch, self.time = step, 0, 0.0
        self.rows: list[tuple[str | int | float, ...]] = []

    def add(self, line: SampleLine, *, batch: int) -> None:
        """Add a row, if there is room; `batch` is the newest that was read."""
        self.batch, self.time = batch, max(self.time, line.finished)
        if len(self.rows) < MAX_ROWS:
            self.rows.append(_row(line))


_LINES = msgspec.json.Decoder(SampleLine)


def _row(line: SampleLine) -> tuple[str | int | float, ...]:
    sample = -1 if line.sample is None else line.sample
    origin = (line.step, line.environment, line.group, line.task, sample)
    texts = (_shortened(line.prompt), _shortened(line.text))
    outcome = (line.reward, json.dumps(line.parts), line.finish, line.tokens, line.actor)
    return (*origin, *texts, *outcome)


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} [... {len(text) - MAX_TEXT} characters ...] {text[-half:]}"


def _parsed(text: bytes) -> tuple[int, Line]:
    """Read a line; its step is -1 where a crash or the disk has damaged it."""
    with suppress(ValueError, RecursionError):
        line = json.loads(text)
        if isinstance(line, dict) and isinstance(step := line.get("step"), int):
            return step, line
    return -1, {}


def _unix_time(line: Line, otherwise: float) -> float:
    value = line.get("time")
    return float(value) if isinstance(value, int | float) else otherwise
