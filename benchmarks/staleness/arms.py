"""Training the arms in processes of their own, and the file of those that have ended.

Not in `__main__`: a spawned process does not import that of a package, and would not find them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.staleness.report import NAIVE, Curve, Point
from benchmarks.support.workload import Workload, make_model

if TYPE_CHECKING:
    from learner.model.ranks import Ranks

METHODS: Mapping[str, tuple[str, ...]] = {
    NAIVE: (
        "algorithm.ignore_behaviour=true",
        "algorithm.correction=none",
        "algorithm.surrogate=reinforce",
        "algorithm.proximal=recomputed",
    ),
    "ppo": ("algorithm.correction=none", "algorithm.surrogate=clip"),
    "tis": ("algorithm.correction=tis", "algorithm.surrogate=reinforce"),
    "tis + clip": ("algorithm.correction=tis", "algorithm.surrogate=clip"),
    "decoupled": (
        "algorithm.correction=tis",
        "algorithm.surrogate=clip",
        "algorithm.proximal=interpolated",
    ),
    "m2po": ("algorithm.correction=none", "algorithm.surrogate=m2po"),
    "vtrace": (
        "algorithm.advantage=vtrace",
        "algorithm.correction=none",
        "algorithm.surrogate=reinforce",
        "algorithm.proximal=recomputed",
        "critic.kind=model",  # a head cannot tell a wrong beginning from a right one
        "critic.lr=3e-4",
        "critic.warmup_batches=10",
        "learner.lr=6e-5",  # it has no trust region: at the others' it collapses at once
    ),
}
"""Method -> its settings. `decoupled` interpolates its anchor: a recomputed one is pi itself in the
only optimizer step of a batch, which would make it `tis`."""


def run(workload: Workload, points: Sequence[Point], *, workers: int) -> dict[Point, Curve]:
    """Train the arms that are not kept, `workers` at a time; returns the curves of all."""
    began = time.monotonic()
    model = make_model(workload)
    arms = Arms(workload.folder / "arms.jsonl", workload.overrides)
    curves = {point: curve for point in points if (curve := arms.kept(point)) is not None}
    # Spawned, because torch's threads do not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        missing = [point for point in points if point not in curves]
        futures = {pool.submit(train_alone, workload, model, point): point for point in missing}
        for future in as_completed(futures):
            point, curve = futures[future], future.result()
            arms.keep(point, curve)
            curves[point] = curve
            shown = f"{point.method} at lag {point.lag}, seed {point.seed}: {curve[-1]:.3f}"
            print(f"{time.monotonic() - began:5.0f} s  {shown}", file=sys.stderr, flush=True)
    return {point: curves[point] for point in points}


def train_alone(workload: Workload, model: Path, point: Point) -> Curve:
    """Train one arm, in a worker process."""
    return train(workload, model, point, ranks=_alone())


def train(workload: Workload, model: Path, point: Point, *, ranks: Ranks) -> Curve:
    """Train one arm."""
    from benchmarks.staleness.lagged_run import LaggedRun  # imports torch

    overrides = (*METHODS[point.method], f"run.model={model}", f"run.seed={point.seed}")
    settings = replace(workload, overrides=(*workload.overrides, *overrides)).settings()
    return LaggedRun(settings, lag=point.lag, ranks=ranks).train()


@cache
def _alone() -> Ranks:
    """Join a process group of one; a process has one in its life."""
    from learner.model.ranks import join

    return join("cpu", threads=1)


class Arms:
    """Finished arms as JSON lines, each with its settings: other settings are another arm."""

    def __init__(self, path: Path, shared: Sequence[str]) -> None:
        self._path = path
        self._shared = shared
        lines = path.read_text().splitlines() if path.exists() else ()
        self._curves = {arm: tuple(curve) for arm, curve in map(json.loads, lines)}

    def kept(self, point: Point) -> Curve | None:
        """Return the curve of an arm, if it is there."""
        return self._curves.get(self._arm(point))

    def keep(self, point: Point, curve: Curve) -> None:
        """Write an arm down."""
        with self._path.open("a") as file:
            file.write(json.dumps([self._arm(point), curve]) + "\n")

    def _arm(self, point: Point) -> str:
        settings = " ".join((*self._shared, *METHODS[point.method]))
        return f"{point.method} at lag {point.lag}, seed {point.seed}: {settings}"
