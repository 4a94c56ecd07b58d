"""Bytes of sparse updates to a group in a real run, and the density of changes by version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.machine import REPOSITORY
from learner.weights.log import read_weight_log

SETTINGS = (
    "run.dtype=bfloat16",
    'actors.pull_from=["peers","publisher"]',  # not out of memory: by groups, as elsewhere
    "learner.sparse_weights=true",
    "learner.checkpoint_every=1000",
)
TIMEOUT_S = 900.0


def sparse_run(
    folder: Path, preset: str, *, lr: float, steps: int, overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Train with `nyala up`; returns density and bytes of each version, and their ratio."""
    name = f"lr-{lr:g}"
    settings = (
        *SETTINGS,
        f"run.name={name}",
        f"run.directory={folder}",
        f"run.steps={steps}",
        f"run.eval_every={steps}",
        f"learner.lr={lr:g}",
        *overrides,
    )
    command = [sys.executable, "-c", "from console.main import app; app()", "up", preset, "--plain"]
    for setting in settings:
        command += ["--set", setting]
    with (folder / f"{name}.log").open("wb") as log:
        subprocess.run(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            timeout=TIMEOUT_S,
            check=True,
        )
    lines = list(read_weight_log(folder / name))
    num_bytes = next(line["num_bytes"] for line in lines if line["event"] == "sealed")
    found = [line for line in lines if line["event"] == "delivered" and line["density"] < 1]
    sent = [line["sparse_bytes"] or num_bytes for line in found]
    by_group = [line["member_bytes"] for line in found if line["member_bytes"]]
    densities = [round(line["density"], 6) for line in found]
    return {
        "preset": preset,
        "lr": lr,
        "dtype": "bfloat16",
        "dense_bytes": num_bytes,
        "versions": len(found),
        "density": densities,
        "density_median": median(densities),
        "sparse_bytes_median": median(sent),
        "fewer": round(num_bytes * len(sent) / sum(sent), 1),
        "group_versions": len(by_group),
        "group_fewer": round(num_bytes * len(by_group) / sum(by_group), 1) if by_group else None,
    }
