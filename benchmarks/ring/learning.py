"""Learning per batch, and time to accuracy: the ring with and without policy lag beside TRL.

One initial model, the same prompts in the same order, the same loss and optimizer; seed by seed, in
turns. Clocks begin twice: at the first batch, and when the process was started. Evaluations are in
the time of both; TRL's also by themselves.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from benchmarks.ring.trl.process import flags_of, run_trl, trl_is_missing
from benchmarks.ring.watched_run import Trace, watch
from benchmarks.support.progress import Say
from benchmarks.support.workload import Workload, make_model, write_held_out, write_prompts

Figures = tuple[float, float | None]
"""Mean and standard deviation; None of one seed alone."""

LAGS = {"lag_2": 2, "lag_0": 0}
TRLS = {"trl_dapo": 1, "trl_dapo_2_threads": 2}
"""Arm -> threads of its one process; the ring has a thread in each of its processes."""
TARGET = 0.95
LOOKED_AT = (30, 60, 90, 120)
"""Batches whose accuracy is compared."""


def learning(folder: Path, *, seeds: int, say: Say) -> dict[str, Any]:
    """Train the demo from one model by all arms, and compare their curves."""
    base = Workload("learning", "demo.yaml", folder, ("actors.engine=torch",))
    base = replace(base, model=make_model(base))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*LAGS, *TRLS)}
    missing = trl_is_missing()
    if missing:
        say(f"trl: skipped; {missing}")
    for seed in range(seeds):
        for name, lag in LAGS.items():
            overrides = (*base.overrides, f"run.max_policy_lag={lag}", f"run.seed={seed}")
            workload = replace(base, name=f"{name}-{seed}", overrides=overrides)
            runs[name].append(train_ring(workload))
            say(f"{name}, seed {seed}: {runs[name][-1]}")
        for name, threads in {} if missing else TRLS.items():
            runs[name].append(_trl(base, seed, threads))
            say(f"{name}, seed {seed}: {runs[name][-1]}")
    arms = {
        name: together(found) if found else {"skipped": missing} for name, found in runs.items()
    }
    return arms | {
        f"{first}_minus_{second}": {"accuracy_mean_sd": difference(runs[first], runs[second])}
        for first, second in combinations(runs, 2)
        if runs[first] and runs[second]
    }


def train_ring(workload: Workload) -> dict[str, Any]:
    began = time.time()
    batches = workload.settings().run.steps
    trace = watch(
        workload, lambda seen: bool(seen.evaluations) and seen.evaluations[-1]["step"] >= batches
    )
    first = trace.metrics[0]["time"] - trace.seconds(1)
    return _figures(
        {
            line["step"]: (_trained_at(trace, line["step"], first), line["accuracy"])
            for line in trace.evaluations
        },
        began=began,
        first=first,
    )


def _trained_at(trace: Trace, step: int, first: float) -> float:
    return first + trace.seconds(step)


def _trl(base: Workload, seed: int, threads: int) -> dict[str, Any]:
    settings = base.settings()
    run = settings.run
    prompts = write_prompts(base, run.steps * run.groups_per_batch)
    held_out = write_held_out(base, run.eval_episodes)
    began = time.time()
    found = run_trl(
        base.folder / "trl.log",
        model=base.model,
        prompts=prompts,
        held_out=held_out,
        steps=run.steps,
        **flags_of(settings),
        seed=seed,
        threads=threads,
    )
    evaluations = found["evaluations"]
    curve = {line["step"]: (line["time"], line["accuracy"]) for line in evaluations}
    first = evaluations[0]["time"] + evaluations[0]["took_s"]
    took = sum(line["took_s"] for line in evaluations[1:])
    return _figures(curve, began=began, first=first) | {"evaluations_s": round(took, 1)}


def _figures(
    curve: dict[int, tuple[float, float]], *, began: float, first: float
) -> dict[str, Any]:
    """Tell when the target was reached, and the accuracy at the batches that are looked at."""
    at = reached(curve, TARGET)
    return {
        "from_first_batch_s": None if at is None else round(max(0.0, at - first), 2),
        "from_start_s": None if at is None else round(at - began, 2),
        "all_batches_s": round(max(when for when, _ in curve.values()) - first, 2),
        "accuracy": {step: round(curve[step][1], 3) for step in LOOKED_AT if step in curve},
    }


def reached(curve: dict[int, tuple[float, float]], target: float) -> float | None:
    """Return when a curve of step -> (time, accuracy) first reaches a target, by straight lines."""
    points = [curve[step] for step in sorted(curve)]
    for (before, low), (after, high) in pairwise(points):
        if high >= target:
            return before + (after - before) * max(0.0, (target - low) / (high - low))
    return None


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the times with their intervals, mean and spread of accuracies, all runs.

    An interval is from the least to the largest: it holds the median of many seeds in 94 % of
    cases with five seeds, in 75 % with three. None in it is a run that did not get there.
    """
    times: dict[str, Any] = {}
    for name in ("from_first_batch_s", "from_start_s", "all_batches_s"):
        values = sorted(math.inf if run[name] is None else run[name] for run in runs)
        figures = statistics.median(values), values[0], values[-1]
        times[name], *times[f"{name}_interval"] = (
            None if math.isinf(value) else round(value, 2) for value in figures
        )
    found = {step: [run["accuracy"].get(step) for run in runs] for step in LOOKED_AT}
    return times | {"accuracy_mean_sd": _mean_sd(found), "runs": runs}


def difference(
    runs: list[dict[str, Any]], others: list[dict[str, Any]], steps: Sequence[Any] = LOOKED_AT
) -> dict[Any, Figures]:
    """Return mean and standard deviation of the first's accuracies minus the others', by seed."""
    pairs = list(zip(runs, others, strict=True))
    found: dict[Any, list[float | None]] = {}
    for step in steps:
        both = [(run["accuracy"].get(step), other["accuracy"].get(step)) for run, other in pairs]
        found[step] = [None if a is None or b is None else a - b for a, b in both]
    return _mean_sd(found)


def _mean_sd(found: dict[Any, list[float | None]]) -> dict[Any, Figures]:
    known = {step: [v for v in values if v is not None] for step, values in found.items()}
    return {
        step: (
            round(statistics.mean(values), 3),
            round(statistics.stdev(values), 3) if len(values) > 1 else None,
        )
        for step, values in known.items()
        if values
    }
