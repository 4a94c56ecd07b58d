"""Asynchrony where it must pay: episodes of very unequal length, and a slow tool, by policy lag.

Both runs train the same batches from the same model; with `max_policy_lag: 0` the learner waits for
the last episode of each batch before the next one begins.

`least_batch_s` is the least time for a batch that the parts allow which were measured: nobody waits
for anybody, so the busiest of them decides. The learner and the actor are one thread each, and no
more than `max_policy_lag + 1` batches are open at a time, each for as long as the tool takes.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.ring.watched_run import WARM_UP_BATCHES, Trace, watch
from benchmarks.support.machine import REPOSITORY
from benchmarks.support.progress import Say
from benchmarks.support.workload import THROUGHPUT, Workload, make_model

ENVIRONMENTS = {
    "heavy_tail": ("HeavyTail", "{median: 2, sigma: 1.0, most: 16}", "[a]", 96),
    "slow_tool": ("SlowTool", "{tool_s: 1.0}", "[a, e, i, o]", 256),
}
"""Class, its settings, stop strings (a turn of the random model is 30 or 10 tokens long), and
episodes at a time: with more of them each takes longer, and the longest become stale."""
TOOL_S = {"slow_tool": 1.0}
LAGS = {"async": 8, "sync": 0}
"""The tool, and the longest episodes, take as long as several batches."""
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
    return {
        f"{name}_{arm}": summarise(
            seen[f"{name}_{arm}"], last, open_s=TOOL_S.get(name, 0.0) / (lag + 1)
        )
        for name in names
        for arm, lag in LAGS.items()
    }


def _settings(name: str) -> tuple[str, ...]:
    kind, settings, stop, places = ENVIRONMENTS[name]
    return (
        f"run.environment={FILE}:{kind}",
        f"run.environment_settings={settings}",
        "run.max_completion_tokens=512",
        f"run.stop={stop}",
        f"actors.max_concurrent_episodes={places}",
    )


def summarise(traces: list[Trace], last: int, *, open_s: float) -> dict[str, Any]:
    """Return medians over runs of one arm.

    Args:
        traces: Of the runs.
        last: Batch up to which they are looked at.
        open_s: Least time for a batch because of those that may be open.
    """
    runs = [_figures(trace, last) for trace in traces]
    found: dict[str, Any] = {
        name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]
    }
    found["least_batch_s"] = max(found["learner_s"], found["actor_cpu_s"], round(open_s, 3))
    return found | {"all_tokens_per_s": [round(run["tokens_per_s"], 1) for run in runs]}


def _figures(trace: Trace, last: int) -> dict[str, float]:
    batch_s = (trace.seconds(last) - trace.seconds(WARM_UP_BATCHES)) / (last - WARM_UP_BATCHES)
    idle = trace.idle_fraction(WARM_UP_BATCHES, last)
    return {
        "tokens_per_s": trace.tokens_per_s(WARM_UP_BATCHES, last),
        "learner_idle_fraction": idle,
        "batch_s": batch_s,
        "learner_s": (1 - idle) * batch_s,
        "actor_cpu_s": trace.cpu_ms_per_batch(WARM_UP_BATCHES, last)["actors"] / 1e3,
    }
