"""A whole run, `nyala up` in a process of its own, watched from outside: its files and its CPU."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.support.machine import ProcessTree
from benchmarks.support.workload import Workload, environment, make_model
from learner.phase_names import PHASES

LOOK_EVERY_S = 0.05
LIMIT_S = 1200.0
STOP_S = 60.0
WARM_UP_BATCHES = 5  # the first were made while nobody trained
RATES = ("tokens_per_cpu_s", "tokens_per_s")

Line = dict[str, Any]
Figures = dict[str, Any]


@dataclass(slots=True)
class Trace:
    """What was seen of a run so far."""

    metrics: list[Line] = field(default_factory=list)
    """One line per batch."""
    evaluations: list[Line] = field(default_factory=list)
    cpu_ms: dict[int, Counter[str]] = field(default_factory=dict)
    """Batch -> CPU milliseconds by role when its line was seen."""

    def seconds(self, step: int) -> float:
        """Return the time from the first complete batch to the end of batch `step`; 0 at 0."""
        if step == 0:
            return 0.0
        first = self.metrics[0]
        worked = sum(first[f"{phase}_s"] for phase in PHASES if phase != "wait")
        return float(self.metrics[step - 1]["time"] - first["time"] + worked)

    def tokens_per_cpu_s(self, first: int, last: int) -> float:
        """Return trained tokens per CPU second of all processes, after batch `first` to `last`."""
        tokens = sum(
            line["trained_tokens"] for line in self.metrics[self._seen(first) : self._seen(last)]
        )
        return float(tokens / self.cpu_s(first, last))

    def cpu_s(self, first: int, last: int) -> float:
        """Return CPU seconds of all processes, after batch `first` to `last`."""
        return (self.cpu_ms[self._seen(last)] - self.cpu_ms[self._seen(first)]).total() / 1e3

    def cpu_ms_per_batch(self, first: int, last: int) -> dict[str, float]:
        """Return what a batch costs each role, milliseconds."""
        first, last = self._seen(first), self._seen(last)
        used = self.cpu_ms[last] - self.cpu_ms[first]
        return {role: round(ms / (last - first), 1) for role, ms in used.most_common()}

    def tokens_per_s(self, first: int, last: int) -> float:
        """Return trained tokens per second, after batch `first` to `last`."""
        tokens = sum(line["trained_tokens"] for line in self.metrics[first:last])
        return float(tokens / (self.seconds(last) - self.seconds(first)))

    def idle_fraction(self, first: int, last: int) -> float:
        """Return the share of the learner's time that went into waiting for batches."""
        waited = sum(line["wait_s"] for line in self.metrics[first:last])
        return float(waited / (self.seconds(last) - self.seconds(first)))

    def _seen(self, step: int) -> int:
        """Return the last batch up to `step` whose CPU time is known: a look may find several."""
        return max(seen for seen in self.cpu_ms if seen <= step)


def time_to_accuracy(trace: Trace, target: float) -> float | None:
    """Return the seconds to a held-out accuracy, between evaluations by a straight line."""
    before = (0.0, 0.0)
    for line in sorted(trace.evaluations, key=lambda line: line["step"]):
        now = trace.seconds(line["step"]), float(line["accuracy"])
        if now[1] >= target:
            share = (target - before[1]) / (now[1] - before[1])
            return before[0] + share * (now[0] - before[0])
        before = now
    return None


def watch(
    workload: Workload, enough: Callable[[Trace], bool], *, limit_s: float = LIMIT_S
) -> Trace:
    """Run until `enough` has been seen or the run has ended, then stop it."""
    folder = workload.settings().run.folder
    trace = Trace()
    deadline = time.monotonic() + limit_s
    with _up(workload) as process:
        tree = ProcessTree(process.pid)
        while not enough(trace):
            is_over = process.poll() is not None
            metrics = _lines(folder / "metrics.jsonl")
            if len(metrics) > len(trace.metrics):
                trace.cpu_ms[len(metrics)] = tree.look()
                trace.metrics = metrics
            trace.evaluations = _lines(folder / "eval.jsonl")
            if is_over:
                if process.returncode != 0:
                    raise RuntimeError(f"{workload.name} ended with {process.returncode}")
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{workload.name} was not done after {limit_s:g} s")
            time.sleep(LOOK_EVERY_S)
    return trace


def measure_ring(workload: Workload, batches: int) -> Figures:
    """Run the whole ring for so many batches after those that warm it up."""
    workload = replace(workload, model=make_model(workload))
    last = WARM_UP_BATCHES + batches
    trace = watch(workload, lambda seen: len(seen.metrics) >= last)
    return {
        "tokens_per_cpu_s": round(trace.tokens_per_cpu_s(WARM_UP_BATCHES, last), 1),
        "tokens_per_s": round(trace.tokens_per_s(WARM_UP_BATCHES, last), 1),
        "learner_idle_fraction": round(trace.idle_fraction(WARM_UP_BATCHES, last), 4),
        "cpu_ms_per_batch": trace.cpu_ms_per_batch(WARM_UP_BATCHES, last),
    }


def together(runs: list[Figures]) -> Figures:
    """Return the medians of the rates, what each round gave, and the rest of the last round."""
    medians = {name: statistics.median(run[name] for run in runs) for name in RATES}
    return runs[-1] | medians | {f"{name}_by_round": [run[name] for run in runs] for name in RATES}


@contextmanager
def _up(workload: Workload) -> Iterator[subprocess.Popen[bytes]]:
    flags = [text for override in workload.flags for text in ("--set", override)]
    program = [sys.executable, "-c", "from console.main import app; app()"]
    workload.folder.mkdir(parents=True, exist_ok=True)
    with (workload.folder / f"{workload.name}.log").open("w") as log:
        process = subprocess.Popen(
            [*program, "up", str(workload.config), "--plain", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its guard ends what it had started
                process.wait()


def _lines(path: Path) -> list[Line]:
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]
