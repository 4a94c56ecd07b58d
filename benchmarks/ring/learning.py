"""Learning per batch, and time to accuracy: the ring with and without policy lag beside TRL.

One initial model, the same prompts in the same order, the same loss and optimizer; seed by seed, in
turns. Clocks begin twice: at the first batch, and when the process was started. Evaluations are in
the time of both; TRL's also by themselves.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.ring.arms import Say
from benchmarks.ring.trl_process import run_trl, trl_is_missing
from benchmarks.ring.watched_run import Trace, watch
from benchmarks.support.workload import Workload, make_model, write_held_out, write_prompts

LAGS = {"lag_2": 2, "lag_0": 0}
TARGET = 0.95
LOOKED_AT = (30, 60, 90, 120)
"""Batches whose accuracy is compared."""


def learning(folder: Path, *, seeds: int, say: Say) -> dict[str, Any]:
    """Train the demo from one model by all arms, and compare their curves."""
    base = Workload("learning", "demo.yaml", folder, ("actors.engine=torch",))
    base = replace(base, model=make_model(base))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*LAGS, "trl_dapo")}
    missing = trl_is_missing()
    if missing:
        say(f"trl_dapo: skipped; {missing}")
    for seed in range(seeds):
        for name, lag in LAGS.items():
            overrides = (*base.overrides, f"run.max_policy_lag={lag}", f"run.seed={seed}")
            workload = replace(base, name=f"{name}-{seed}", overrides=overrides)
            runs[name].append(_ring(workload))
            say(f"{name}, seed {seed}: {runs[name][-1]}")
        if not missing:
            runs["trl_dapo"].append(_trl(base, seed))
            say(f"trl_dapo, seed {seed}: {runs['trl_dapo'][-1]}")
    return {
        name: _together(found) if found else {"skipped": missing} for name, found in runs.items()
    }


def _ring(workload: Workload) -> dict[str, Any]:
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


def _trl(base: Workload, seed: int) -> dict[str, Any]:
    settings = base.settings()
    run, learner = settings.run, settings.learner
    prompts = write_prompts(base, run.steps * run.groups_per_batch)
    held_out = write_held_out(base, run.eval_episodes)
    began = time.time()
    found = run_trl(
        base.folder / "trl.log",
        model=base.model,
        prompts=prompts,
        held_out=held_out,
        eval_every=run.eval_every,
        steps=run.steps,
        batch=run.group_size * run.groups_per_batch,
        group_size=run.group_size,
        max_tokens=run.max_completion_tokens,
        lr=learner.lr,
        lr_warmup_steps=learner.lr_warmup_steps,
        adam_beta2=learner.adam_beta2,
        seed=seed,
        threads=1,
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


def _together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the times, mean and standard deviation of the accuracies, and all runs."""
    times = {}
    for name in ("from_first_batch_s", "from_start_s", "all_batches_s"):
        values = [math.inf if run[name] is None else run[name] for run in runs]
        middle = statistics.median(values)
        times[name] = None if math.isinf(middle) else round(middle, 2)
    accuracy = {}
    for step in LOOKED_AT:
        values = [run["accuracy"][step] for run in runs if step in run["accuracy"]]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            accuracy[step] = [round(statistics.mean(values), 3), round(spread, 3)]
    return times | {"accuracy_mean_sd": accuracy, "runs": runs}
