"""The cost of old data: `python -m benchmarks.staleness [--full] [--plot PNG]`.

A small model learns the demo's task from episodes of the policy of `lag` batches ago: in one
process and without a network, but with a run's own sampler, reward, packing and training step
(`lagged_run.py`). Arms are methods x lags x seeds; at lag 0 the target policy is the behaviour
policy. `naive` is the reference: the on-policy gradient, which takes every episode for one of the
newest policy (`algorithm.ignore_behaviour`).

All arms share model, batch size and, but for `vtrace`, learning rate. Figures are greedy accuracy
on held-out prompts: `final` at the end, and `area` under its curve = its mean over the run. The
first `lag` batches of an arm all come from the policy at the start.

Progress goes to stderr; one JSON object comes last. Its `ratios` are all better when larger. The
default (two methods, two lags, one seed) takes under two minutes; numbers to quote come from
`--full`. With `--folder` the model and every arm that ends are kept, and not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.staleness.report import NAIVE, Curve, Point, draw, ratios, summarise, table
from benchmarks.support.machine import describe_machine
from benchmarks.support.workload import Workload, make_model

if TYPE_CHECKING:
    from learner.model.ranks import Ranks

WORDS = "{dataset: spell_backward, min_word_len: 4, max_word_len: 4, dense: true}"
TASK = (
    f"run.environment_settings={WORDS}",
    "run.max_prompt_tokens=8",
    "run.max_completion_tokens=7",
    "run.group_size=8",
    "run.groups_per_batch=8",
    "run.eval_episodes=256",
    "learner.init_layers=2",
    "learner.init_width=64",
    "learner.warm_start_steps=300",
    "learner.lr=1e-3",
    "learner.lr_warmup_steps=0",
)
"""Over the demo's preset: words of four letters and a model of 100 000 parameters."""

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


@dataclass(frozen=True, slots=True)
class Size:
    """Which arms are run, and for how long."""

    methods: tuple[str, ...]
    lags: tuple[int, ...]
    seeds: int
    steps: int
    evaluations: int


SHORT = Size((NAIVE, "ppo"), (0, 16), seeds=1, steps=160, evaluations=4)
FULL = Size(tuple(METHODS), (0, 1, 4, 16, 64, 256), seeds=3, steps=320, evaluations=10)


def main() -> None:
    """Run the arms and print what they gave."""
    chosen = _arguments()
    size = FULL if chosen.full else SHORT
    points = [
        Point(lag, method, seed)
        for seed, lag, method in product(
            range(chosen.seeds or size.seeds),
            chosen.lag or size.lags,
            chosen.method or size.methods,
        )
    ]
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="nyala-staleness-") as scratch:
        folder = (chosen.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        workload = Workload("staleness", "demo.yaml", folder, overrides=task(size, chosen.set))
        arms = summarise(run(workload, points, workers=chosen.workers))
    if chosen.plot is not None:
        draw(arms, chosen.plot)
    machine["load_after"] = describe_machine()["load"]
    print(table(arms), file=sys.stderr)
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def task(size: Size, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return all settings that the arms share."""
    steps = (f"run.steps={size.steps}", f"run.eval_every={size.steps // size.evaluations}")
    return (*TASK, *steps, *overrides)


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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="numbers to quote; forty minutes on two cores"
    )
    parser.add_argument("--method", action="append", choices=METHODS, help="may be given again")
    parser.add_argument("--lag", action="append", type=int, help="may be given again")
    parser.add_argument("--seeds", type=int, help="runs of each method at each lag")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--folder", type=Path, help="keep the model and finished arms here")
    parser.add_argument("--plot", type=Path, help="draw accuracy over lag here, PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
