"""Phases add up, on a CPU by its clock and on a GPU by events that nothing waits for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from learner.phase_names import PHASES
from learner.profiling import GIB, Recorder

CPU = torch.device("cpu")


class FakeGpu:
    """torch.cuda as far as phases use it: a stream's time and its memory are set by the test."""

    def __init__(self) -> None:
        self.time_ms, self.allocated, self.peak = 0.0, 0, 0
        self.waited_for: list[float] = []
        self.ranges: list[str] = []

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        gpu = self

        class Event:
            def record(self) -> None:
                self.time_ms = gpu.time_ms

            def synchronize(self) -> None:
                gpu.waited_for.append(self.time_ms)

            def elapsed_time(self, later: Any) -> float:
                return float(later.time_ms - self.time_ms)

        return Event()

    def use(self, gib: int) -> None:
        """Allocate, and free it again."""
        self.peak = max(self.peak, self.allocated + gib * GIB)

    def forget_peak(self) -> None:
        """As the allocator does."""
        self.peak = self.allocated

    def range(self, name: str) -> Any:
        """Note an NVTX range."""
        self.ranges.append(name)
        return contextlib.nullcontext()


def test_phases_and_what_is_in_none_add_up_to_the_time_that_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    recorder = Recorder()
    with recorder.phase("pack"):
        now += 50  # before `begin_recording`: nobody asked
    recorder.begin_recording(CPU)

    with recorder.phase("wait"):
        now += 1
        with recorder.phase("fetch"):
            now += 2
        now += 4
    now += 8
    with contextlib.suppress(KeyError), recorder.phase("wait"):
        now += 16
        raise KeyError
    first = recorder.take_measurements()
    now += 32
    second = recorder.take_measurements()

    assert first.seconds == dict.fromkeys(PHASES, 0.0) | {"wait": 21, "fetch": 2, "other": 8}
    assert second.seconds == dict.fromkeys(PHASES, 0.0) | {"other": 32}
    assert first.peak_gib is None, "a CPU's allocator does not count"


def test_a_gpu_is_timed_by_its_stream_and_each_phase_has_a_peak_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, recorder = FakeGpu(), Recorder()
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gpu.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.forget_peak)
    monkeypatch.setattr(torch.cuda.nvtx, "range", gpu.range)
    recorder.begin_recording(torch.device("cuda"))

    with recorder.phase("forward"):
        gpu.time_ms += 2000
        gpu.use(3)
    gpu.allocated = GIB
    with recorder.phase("backward"):
        gpu.time_ms += 5000
        gpu.use(6)
    with recorder.phase("forward"):
        gpu.time_ms += 1000
        gpu.use(1)
    measured = recorder.take_measurements()

    assert (measured.seconds["forward"], measured.seconds["backward"]) == (3, 5)
    assert measured.peak_gib == {"forward": 3, "backward": 7, "other": 1}
    assert gpu.waited_for == [8000], "once, at the end of a batch"
    assert gpu.ranges == ["nyala.forward", "nyala.backward", "nyala.forward"]
