"""The cost of old data: `python -m benchmarks.staleness [--full]`.

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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.staleness.arms import METHODS, run
from benchmarks.staleness.report import NAIVE, Point, ratios, summarise, table
from benchmarks.support.machine import describe_machine
from benchmarks.support.workload import Workload

WORDS = (
    "{dataset: spell_backward, prompt_style: compact, "
    "min_word_len: 4, max_word_len: 4, dense: true}"
)
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
    machine["load_after"] = describe_machine()["load"]
    print(table(arms), file=sys.stderr)
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def task(size: Size, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return all settings that the arms share."""
    steps = (f"run.steps={size.steps}", f"run.eval_every={size.steps // size.evaluations}")
    return (*TASK, *steps, *overrides)


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
    return parser.parse_args()


if __name__ == "__main__":
    main()
