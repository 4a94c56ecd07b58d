"""Whole runs to the same held-out accuracy: asynchronous against synchronous."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.ring.watched_run import Trace, time_to_accuracy, watch
from benchmarks.support.progress import Say
from benchmarks.support.workload import Workload, make_model

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
