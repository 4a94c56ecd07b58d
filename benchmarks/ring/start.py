"""The start of a run: from `nyala up` to the first batch, by the stages that each process logs."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.ring.watched_run import watch
from benchmarks.support.progress import Say
from benchmarks.support.workload import Workload, make_model
from configs.json_lines import Row, read_rows

ENGINES = ("torch", "vllm")
OVERRIDES = ("run.eval_episodes=0", "learner.warm_start_steps=0")


def start(folder: Path, *, passes: int, say: Say) -> dict[str, Any]:
    """Start the demo with each engine, in turns, from a model that is made beforehand."""
    base = Workload("start", "demo.yaml", folder, OVERRIDES)
    base = replace(base, model=make_model(base))
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for index in range(passes):
        for engine, seen in runs.items():
            overrides = (*base.overrides, f"actors.engine={engine}")
            workload = replace(base, name=f"start-{engine}-{index}", overrides=overrides)
            seen.append(_first_batch(workload))
            say(f"{workload.name}: first batch after {seen[-1]['first_batch_s']} s")
    return {f"start_{engine}": median_run(seen) for engine, seen in runs.items()}


def _first_batch(workload: Workload) -> dict[str, Any]:
    began = time.time()
    trace = watch(workload, lambda seen: bool(seen.metrics))
    folder = workload.settings().run.folder
    cpu = trace.cpu_ms[min(trace.cpu_ms)]
    return {
        "first_batch_s": round(trace.metrics[0]["time"] - began, 1),
        "cpu_s": {role: round(ms / 1e3, 1) for role, ms in cpu.most_common()},
        "stages_begin_s": stages_of(folder / "logs", began),
    }


def stages_of(logs: Path, began: float) -> dict[str, dict[str, float]]:
    """Return process -> stage -> seconds from `began` until it began; processes that log some."""
    rows = {path.stem: read_rows(path) for path in sorted(logs.glob("*.log"))}
    stages = {
        name: {str(row["stage"]): round(_time(row) - began, 1) for row in found if "stage" in row}
        for name, found in rows.items()
    }
    return {name: found for name, found in stages.items() if found}


def _time(row: Row) -> float:
    return datetime.fromisoformat(str(row["timestamp"])).timestamp()


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run in the middle by its time, and all times."""
    ordered = sorted(runs, key=lambda run: run["first_batch_s"])
    times = [run["first_batch_s"] for run in runs]
    return ordered[(len(ordered) - 1) // 2] | {
        "first_batch_s": round(statistics.median(times), 1),
        "all_s": times,
    }
