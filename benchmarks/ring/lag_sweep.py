"""Time to accuracy by `max_policy_lag`: the demo with the small engine, seed by seed in turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ring.learning import together, train_ring
from benchmarks.support.progress import Say
from benchmarks.support.workload import Workload, make_model

LAGS = (0, 1, 2, 4, 8)


def lag_sweep(folder: Path, *, seeds: int, say: Say) -> dict[str, Any]:
    """Train the demo from one model with each bound on the policy lag."""
    base = Workload("lag-sweep", "demo.yaml", folder, ("actors.engine=torch",))
    base = replace(base, model=make_model(base))
    runs: dict[int, list[dict[str, Any]]] = {lag: [] for lag in LAGS}
    for seed in range(seeds):
        for lag, found in runs.items():
            overrides = (*base.overrides, f"run.max_policy_lag={lag}", f"run.seed={seed}")
            workload = replace(base, name=f"max-lag-{lag}-{seed}", overrides=overrides)
            found.append(train_ring(workload))
            say(f"max_policy_lag {lag}, seed {seed}: {found[-1]}")
    return {f"max_lag_{lag}": together(found) for lag, found in runs.items()}
