"""The difference between two runs of the same settings: `python -m benchmarks.same_again`.

Arms, each of which is run twice with two actors and no lag:

    repeatable    `run.deterministic`: equal, bit for bit
    small_engine  the same engine without it
    vllm          vLLM, which cannot have it: the difference is shown, and none is claimed

Progress goes to stderr; one JSON object comes last. Its ratio is what being repeatable costs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ring.watched_run import Line, watch
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import Say, say_since
from benchmarks.support.workload import Workload, make_model

IN_STEP = (
    "run.max_policy_lag=0",
    "run.group_size=8",
    "run.groups_per_batch=4",
    "run.eval_episodes=0",
    "actors.count=2",
)
REPEATABLE = (
    "run.deterministic=true",
    "actors.max_concurrent_episodes=1",
    "learner.device=cpu",
    "learner.checkpoint_every=1",
)
ARMS = {
    "repeatable": ("actors.engine=torch", *REPEATABLE),
    "small_engine": ("actors.engine=torch",),
    "vllm": ("actors.engine=vllm",),
}
FIGURES = ("loss", "reward_mean", "grad_norm", "completion_tokens")
FIRST = 2  # batches before that are start-up


def main() -> None:
    """Run all arms and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=20, help="of each run")
    chosen = parser.parse_args()
    say = say_since(time.monotonic())
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="nyala-same-again-") as scratch:
        base = Workload(
            "same-again", "demo.yaml", Path(scratch), (*IN_STEP, f"run.steps={chosen.batches}")
        )
        base = replace(base, model=make_model(base))
        arms = {
            name: run_twice(replace(base, name=name, overrides=(*base.overrides, *more)), say)
            for name, more in ARMS.items()
        }
    machine["load_after"] = describe_machine()["load"]
    cost = arms["repeatable"]["tokens_per_s"] / arms["small_engine"]["tokens_per_s"]
    ratios = {"repeatable_over_usual_tokens_per_s": round(cost, 3)}
    print(json.dumps({"arms": arms, "ratios": ratios, "machine": machine}))


def run_twice(workload: Workload, say: Say) -> dict[str, Any]:
    """Compare the curves of two runs."""
    steps = workload.settings().run.steps
    traces = [
        watch(
            replace(workload, name=f"{workload.name}-{index}"),
            lambda seen: len(seen.metrics) >= steps,
        )
        for index in range(2)
    ]
    first, second = (trace.metrics for trace in traces)
    speeds = [trace.tokens_per_s(FIRST, steps) for trace in traces]
    found = difference(first, second) | {"tokens_per_s": round(sum(speeds) / 2, 1)}
    say(f"{workload.name}: {found}")
    return found


def difference(first: list[Line], second: list[Line]) -> dict[str, Any]:
    """Count the batches that are equal in all figures, and find the largest differences."""
    pairs = list(zip(first, second, strict=True))
    equal = [all(a[figure] == b[figure] for figure in FIGURES) for a, b in pairs]
    return {
        "batches": len(pairs),
        "batches_equal": sum(equal),
        "first_that_differs": None if all(equal) else 1 + equal.index(False),
        **{
            f"largest_difference_{figure}": max(abs(a[figure] - b[figure]) for a, b in pairs)
            for figure in FIGURES
        },
    }


if __name__ == "__main__":
    main()
