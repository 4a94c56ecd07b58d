"""Phases of a batch: seconds, peak memory, and named ranges in traces.

    with phase("forward"):
        scores = policy(...)
    measured = take()     # once for each batch, on every rank

A phase within another counts as itself alone, so phases and `other` add up to the time between two
calls of `take`. Only the thread that trains enters phases: a process has one.

On a GPU the time between two marks is that of its stream (CUDA events, read once the batch is over:
nothing synchronises), and each phase is an NVTX range.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.profiler import record_function

from .phase_names import PHASES

PREFIX = "nyala."
"""Of a phase's name in traces."""
GIB = 2**30

Mark: TypeAlias = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Measured:
    """What the phases of a batch took on this rank."""

    seconds: dict[str, float]
    """Of each of `PHASES`."""
    peak_gib: dict[str, float] | None
    """Most memory allocated during each phase that was entered; None on a CPU, whose allocator does
    not count."""


@dataclass(slots=True)
class Recorder:
    """The phases of one process."""

    is_cuda: bool = False
    is_traced: bool = False
    """A trace is being written: phases are named in it."""
    _open: list[str] = field(default_factory=lambda: ["other"])
    _marks: list[tuple[str, Mark]] = field(default_factory=list)
    """The phase that ended, and when; the first one is a beginning."""
    _peaks: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def begin(self, device: torch.device) -> None:
        """Measure from now on, on this device; before, nothing is."""
        self.is_cuda = device.type == "cuda"
        self._open[1:] = []
        self._marks[:] = [("other", self._now())]
        self._peaks.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens within as `name`."""
        self._mark()
        self._open.append(name)
        try:
            with self._range(name):
                yield
        finally:
            self._mark()
            self._open.pop()

    def take(self) -> Measured:
        """Return what was measured since `begin` or the last call."""
        self._mark()
        seconds = dict.fromkeys(PHASES, 0.0)
        last = self._marks[-1][1]
        if not isinstance(last, int | float):
            last.synchronize()  # the figures of the batch have waited for all but this mark
        for (_, earlier), (name, later) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] += _between_s(earlier, later)
        peaks = {name: round(peak / GIB, 3) for name, peak in self._peaks.items()}
        del self._marks[:-1]
        self._peaks.clear()
        return Measured(seconds, peaks if self.is_cuda else None)

    def _mark(self) -> None:
        """End the innermost phase here, or go on with it."""
        if not self._marks:
            return
        name = self._open[-1]
        self._marks.append((name, self._now()))
        if self.is_cuda:
            self._peaks[name] = max(self._peaks[name], torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def _now(self) -> Mark:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _range(self, name: str) -> AbstractContextManager[object]:
        if self.is_traced:
            return record_function(PREFIX + name)
        return torch.cuda.nvtx.range(PREFIX + name) if self.is_cuda else nullcontext()


def _between_s(earlier: Mark, later: Mark) -> float:
    if isinstance(earlier, int | float) or isinstance(later, int | float):
        assert isinstance(earlier, int | float)
        assert isinstance(later, int | float)
        return later - earlier
    return float(earlier.elapsed_time(later)) / 1000


RECORDER = Recorder()
phase, take = RECORDER.phase, RECORDER.take
