"""Whole runs against each other: asynchronous against synchronous, and the ring against TRL."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.ring.trl.process import run_trl, trl_is_missing
from benchmarks.ring.watched_run import Trace, time_to_accuracy, watch
from benchmarks.support.workload import THROUGHPUT, Workload, make_model, write_prompts

NUM_PROMPTS = 512
WARM_UP_BATCHES = 5  # the first were made while nobody trained

Say = Callable[[str], None]
Figures = dict[str, object]


@dataclass(frozen=True, slots=True)
class Race:
    """To a held-out accuracy, with and without policy lag."""

    preset: str
    overrides: tuple[str, ...]
    target: float
    seeds: tuple[int, ...]


SHORT_RACE = Race(
    preset="demo.yaml",
    overrides=("run.eval_every=2", "run.eval_episodes=128", "actors.engine=torch"),
    target=0.5,
    seeds=(0,),
)
FULL_RACE = Race(preset="demo.yaml", overrides=("run.eval_every=5",), target=0.9, seeds=(0, 1))


def race(folder: Path, settings: Race, *, lags: tuple[int, int] = (2, 0), say: Say) -> Figures:
    """Train the same task from the same model with both policy lags, seed by seed."""
    runs: dict[str, list[dict[str, float | None]]] = {"async": [], "sync": []}
    for seed in settings.seeds:
        base = Workload(
            f"race-{seed}", settings.preset, folder, (*settings.overrides, f"run.seed={seed}")
        )
        model = make_model(base)
        for name, lag in zip(runs, lags, strict=True):
            overrides = (*base.overrides, f"run.max_policy_lag={lag}")
            workload = replace(base, name=f"{name}-{seed}", overrides=overrides, model=model)
            trace = watch(
                workload, lambda seen: time_to_accuracy(seen, settings.target) is not None
            )
            runs[name].append(_race_figures(trace, settings.target))
            say(f"{name}, seed {seed}: {settings.target:.0%} after {runs[name][-1]['time_s']} s")
    return {name: _medians(found) for name, found in runs.items()}


def ring_of_trl_size(folder: Path, name: str, engine: str, *, batches: int, say: Say) -> Figures:
    """Run the whole ring on the batches, the model and the task that TRL gets."""
    workload = Workload(name, "demo.yaml", folder, (*THROUGHPUT, f"actors.engine={engine}"))
    workload = replace(workload, model=make_model(workload))
    last = WARM_UP_BATCHES + batches
    trace = watch(workload, lambda seen: len(seen.metrics) >= last)
    figures = {
        "tokens_per_cpu_s": round(trace.tokens_per_cpu_s(WARM_UP_BATCHES, last), 1),
        "tokens_per_s": round(trace.tokens_per_s(WARM_UP_BATCHES, last), 1),
        "learner_idle_fraction": round(trace.idle_fraction(WARM_UP_BATCHES, last), 4),
        "cpu_ms_per_batch": trace.cpu_ms_per_batch(WARM_UP_BATCHES, last),
    }
    say(f"{name}: {figures['tokens_per_cpu_s']} trained tokens per CPU second")
    return figures


def trl(folder: Path, *, steps: int, threads: tuple[int, ...], say: Say) -> Figures:
    """Run TRL's synchronous GRPO with each number of threads; the most frugal one counts."""
    missing = trl_is_missing()
    if missing:
        say(f"trl: skipped; {missing}")
        return {"skipped": missing}
    workload = Workload("ring", "demo.yaml", folder, THROUGHPUT)
    model, prompts = make_model(workload), write_prompts(workload, NUM_PROMPTS)
    runs = {}
    for count in threads:
        runs[count] = run_trl(
            folder / "trl.log", model=model, prompts=prompts, steps=steps, threads=count, lr=1e-9
        )
        say(f"trl, {count} threads: {runs[count]['tokens_per_cpu_s']:.1f} tokens per CPU second")
    best = max(runs, key=lambda count: runs[count]["tokens_per_cpu_s"])
    return {
        "threads": best,
        **{name: round(value, 3) for name, value in runs[best].items() if name != "evaluations"},
        "tokens_per_s_by_threads": {c: round(r["tokens_per_s"], 1) for c, r in runs.items()},
    }


def _race_figures(trace: Trace, target: float) -> dict[str, float | None]:
    last = len(trace.metrics)
    time_s = time_to_accuracy(trace, target)
    return {
        "time_s": None if time_s is None else round(time_s, 2),
        "batches": last,
        "tokens_per_cpu_s": round(trace.tokens_per_cpu_s(min(trace.cpu_ms), last), 1),
        "learner_idle_fraction": round(trace.idle_fraction(1, last), 4),
    }


def _medians(runs: list[dict[str, float | None]]) -> Figures:
    """Return the median of each figure, or None where one run has none; and all runs."""
    medians: Figures = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        known = [value for value in values if value is not None]
        medians[name] = statistics.median(known) if len(known) == len(values) else None
    return medians | {"runs": runs}
