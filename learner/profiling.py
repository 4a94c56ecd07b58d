"""Time and memory of a batch's phases, traces of chosen batches, and use of the card (MFU)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import structlog
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from configs import durable

from .phase_names import PHASES

# --------------------------------------------------------------------------------------------------
# Phases of a batch: seconds, peak memory, and named ranges in traces.
#
# A phase is what runs within `with phase("forward"):`; `take_measurements()` returns what was
# measured, once for each batch and on every rank.
#
# A phase within another counts as itself alone, so phases and `other` add up to the time between
# two calls of `take_measurements`. Only the thread that trains enters phases: a process has one.
#
# On a GPU the time between two marks is that of its stream (CUDA events, read once the batch is
# over: nothing synchronises), and each phase is an NVTX range.

PREFIX = "nyala."
"""Begins a phase's name in traces."""
GIB = 2**30

Mark: TypeAlias = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class PhaseMeasurements:
    """Times and memory of the phases of a batch on this rank."""

    seconds: dict[str, float]
    """Seconds of each phase in `PHASES`."""
    peak_gib: dict[str, float] | None
    """Most memory allocated during each phase that was entered; None on a CPU, whose allocator does
    not count."""


@dataclass(slots=True)
class Recorder:
    """Recorder of the phases of one process."""

    is_cuda: bool = False
    is_traced: bool = False
    """A trace is being written: phases are named in it."""
    _open: list[str] = field(default_factory=lambda: ["other"])
    _marks: list[tuple[str, Mark]] = field(default_factory=list)
    """The phase that ended, and when; the first one is a beginning."""
    _peaks: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def begin_recording(self, device: torch.device) -> None:
        """Forget what was measured, and measure from now on, on this device."""
        self.is_cuda = device.type == "cuda"
        self._open[1:] = []
        self._marks[:] = [("other", self._now())]
        self._peaks.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the body as phase `name`, one of `PHASES`."""
        self._mark()
        self._open.append(name)
        try:
            with self._range(name):
                yield
        finally:
            self._mark()
            self._open.pop()

    def take_measurements(self) -> PhaseMeasurements:
        """Return the measurements since `begin_recording` or the last call."""
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
        return PhaseMeasurements(seconds, peaks if self.is_cuda else None)

    def _mark(self) -> None:
        """End the innermost phase here, or continue it."""
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
phase, take = RECORDER.phase, RECORDER.take_measurements


# --------------------------------------------------------------------------------------------------
# Traces of chosen batches, in Chrome's format: `<run>/traces/batch-000003-rank-0.json`.
#
# Open one at ui.perfetto.dev or chrome://tracing. Phases are named in it, kernels as torch names
# them. A traced batch is slower, and its trace has some hundred megabytes for a large model.

log = structlog.get_logger()

FOLDER = "traces"


@contextmanager
def traced(run_folder: Path, step: int, *, rank: int) -> Iterator[None]:
    """Write a trace of the body, as the trace of batch `step`; none if the body raises."""
    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as profiler:
        RECORDER.is_traced = True
        try:
            yield
        finally:
            RECORDER.is_traced = False
    folder = run_folder / FOLDER
    durable.make_folder(folder)
    file = folder / f"batch-{step:06d}-rank-{rank}.json"
    profiler.export_chrome_trace(str(file))
    log.info("trace written", step=step, file=str(file))


# --------------------------------------------------------------------------------------------------
# Use of a card's arithmetic by training: MFU.
#
#     MFU = floating-point operations that the model needs / (seconds x ranks x peak of a card)
#
# Needed are a forward and a backward pass over the tokens that were run, as `sequence_cost.py`
# counts them: nothing that activation checkpointing computes again, and none of the passes without
# a gradient. The seconds are those of forward, backward, clip and optimizer, all waits within
# included.

PEAK_TFLOPS = {
    "NVIDIA A10": 125.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.4,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.05,
}
"""Name that the driver gives a card -> 10^12 operations a second in bfloat16, dense, as NVIDIA's
data sheets state them (half of a figure "with sparsity")."""
TRAINING = ("forward", "backward", "clip", "optimizer")
"""The phases of optimizer steps."""
PER_MULTIPLY_ADD = 6.0
"""Operations of a forward and a backward pass: two for the one, four for the other."""


def stated_peak(device: torch.device, dtype: str) -> float | None:
    """Return a card's peak, 10^12 operations a second; None where none is stated for it.

    None also on a CPU, and with a `dtype` other than bfloat16.
    """
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    return PEAK_TFLOPS.get(torch.cuda.get_device_name(device))


def utilization(
    multiply_adds: float, seconds: Mapping[str, float], *, ranks: int, peak_tflops: float | None
) -> float | None:
    """Compute the MFU of a batch, 0 to 1; None without a peak, or if training took no time.

    Args:
        multiply_adds: Multiply-adds of one forward pass over what all ranks trained in all epochs.
        seconds: Phase -> its seconds.
        ranks: Number of cards.
        peak_tflops: Peak of one card.
    """
    spent_s = sum(seconds[name] for name in TRAINING)
    if peak_tflops is None or not spent_s:
        return None
    return PER_MULTIPLY_ADD * multiply_adds / (spent_s * ranks * peak_tflops * 1e12)
