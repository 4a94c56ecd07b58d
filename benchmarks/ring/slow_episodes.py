"""Asynchrony where it must pay: episodes of very unequal length, and a slow tool, by policy lag.

Both runs train the same batches from the same model; with `max_policy_lag: 0` the learner waits for
the last episode of each batch before the next one begins.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.ring.arms import WARM_UP_BATCHES, Say
from benchmarks.ring.watched_run import Trace, watch
from benchmarks.support.machine import REPOSITORY
from benchmarks.support.workload import THROUGHPUT, Workload, make_model

ENVIRONMENTS = {
    "heavy_tail": ("HeavyTail", "{median: 4, sigma: 1.0, most: 48}"),
    "slow_tool": ("SlowTool", "{tool_s: 1.0}"),
}
LAGS = {"async": 2, "sync": 0}
FILE = REPOSITORY / "benchmarks" / "ring" / "slow_environments.py"


def slow_episodes(
    folder: Path, names: list[str], *, rounds: int, batches: int, say: Say
) -> dict[str, Any]:
    """Measure trained tokens per second with and without policy lag, in turns."""
    model = make_model(Workload("slow", "demo.yaml", folder, THROUGHPUT))
    last = WARM_UP_BATCHES + batches
    seen: dict[str, list[Trace]] = {}
    for index in range(rounds):
        for name in names:
            for arm, lag in LAGS.items():
                label = f"{name}_{arm}"
                overrides = (*THROUGHPUT, *_settings(name), f"run.max_policy_lag={lag}")
                workload = Workload(f"{label}-{index}", "demo.yaml", folder, overrides, model)
                trace = watch(workload, lambda trace: len(trace.metrics) >= last)
                seen.setdefault(label, []).append(trace)
                rate = trace.tokens_per_s(WARM_UP_BATCHES, last)
                say(f"{workload.name}: {rate:.0f} trained tokens/s")
    return {label: _together(traces, last) for label, traces in seen.items()}


def _settings(name: str) -> tuple[str, ...]:
    kind, settings = ENVIRONMENTS[name]
    return (
        f"run.environment={FILE}:{kind}",
        f"run.environment_settings={settings}",
        "run.max_completion_tokens=512",
        "run.stop=[a, e, i, o]",  # a turn of the random model is about ten tokens long
        "actors.engine=torch",
    )


def _together(traces: list[Trace], last: int) -> dict[str, Any]:
    rates = [round(trace.tokens_per_s(WARM_UP_BATCHES, last), 1) for trace in traces]
    idle = [trace.idle_fraction(WARM_UP_BATCHES, last) for trace in traces]
    return {
        "tokens_per_s": statistics.median(rates),
        "learner_idle_fraction": round(statistics.median(idle), 3),
        "all_tokens_per_s": rates,
    }
