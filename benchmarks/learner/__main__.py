"""Speed and memory of the learner's step, beside loops that one would write first.

`python -m benchmarks.learner [--full] [--only FIGURE]`. Figures, each with all its arms in this one
run, in turns, one thread, CPU seconds, and a fresh process for each measurement:

    step          a batch through our step, through a padded loop of plain transformers with full
                  logits, and this project's step at 5cf2266, default and best budget of tokens
    output_layer  log-probs, entropies and gradients from hidden states, beside full logits
    activations   bytes that one more layer keeps per token, by `learner.activation_checkpointing`

Progress goes to stderr; one JSON object comes last. Its `ratios` are all better when larger.
Numbers to quote come from `--full`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.support.machine import REPOSITORY, describe_machine
from benchmarks.support.progress import say_since
from console.run.card_memory import ModelShape

FIGURES = ("step", "output_layer", "activations")
ARM_TIMEOUT_S = 900
DEFAULT_BUDGET, BEST_BUDGET = 16384, 2048
SHAPES = {"32k": (2048, 256, 32_000), "152k": (512, 512, 151_936)}
QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


class Arm(NamedTuple):
    """One measurement: its name in the result, and the arguments of its process."""

    name: str
    arguments: tuple[str | int, ...]


class Size(NamedTuple):
    """How much is measured."""

    rounds: int
    groups: int
    prompts: tuple[tuple[int, int], ...]


SHORT = Size(rounds=1, groups=1, prompts=((64, 192),))
FULL = Size(rounds=5, groups=2, prompts=((64, 192), (400, 600)))


def main() -> None:
    """Measure the chosen figures and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="numbers to quote")
    parser.add_argument("--only", action="append", choices=FIGURES, help="may be given again")
    chosen = parser.parse_args()
    size, figures = FULL if chosen.full else SHORT, chosen.only or FIGURES
    machine = describe_machine()
    arms: dict[str, Any] = {}
    if "step" in figures:
        arms |= take_turns(step_arms(size), size.rounds)
    if "output_layer" in figures:
        arms |= take_turns(output_layer_arms(), size.rounds)
    if "activations" in figures:
        arms["activations"] = kept_bytes()
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def step_arms(size: Size) -> list[Arm]:
    """Our step and what it is compared with, for each length of prompts."""
    return [
        Arm(f"{name}_{prompts[0]}", (kind, size.groups, budget, *prompts))
        for prompts in size.prompts
        for name, kind, budget in (
            ("plain", "plain", 0),
            ("before", "before", DEFAULT_BUDGET),
            ("before_best", "before", BEST_BUDGET),
            ("ours", "ours", DEFAULT_BUDGET),
            ("ours_best", "ours", BEST_BUDGET),
        )
    ]


def output_layer_arms() -> list[Arm]:
    """Our output layer, the one before, and full logits."""
    return [
        Arm(f"{name}_{vocabulary}", (name, *shape))
        for vocabulary, shape in SHAPES.items()
        for name in ("full", "before", "ours")
    ]


def take_turns(arms: Sequence[Arm], rounds: int) -> dict[str, dict[str, float]]:
    """Run each arm once a round; the medians of its figures."""
    say = say_since(time.monotonic())
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(rounds):
        for arm in arms:
            for key, value in _run(arm).items():
                found[arm.name][key].append(value)
            say(f"{turn + 1}/{rounds} {arm.name}: {found[arm.name]['cpu_s'][-1]:.2f} s")
    return {
        name: {key: round(median(values), 3) for key, values in figures.items()}
        for name, figures in found.items()
    }


def _run(arm: Arm) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.learner.arm", *map(str, arm.arguments)],
        stdout=subprocess.PIPE,
        timeout=ARM_TIMEOUT_S,
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def kept_bytes() -> dict[str, float]:
    """Bytes per token and layer of a model of 4B in bfloat16, as `nyala up --dry-run` has them.

    `tests/learner/model/test_activation_checkpointing.py` counts them in a real layer.
    """
    shape = ModelShape.of(QWEN3_4B)
    return {kind: float(shape.kept(kind, 2)) for kind in ("none", "selective", "full")}


def ratios(arms: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Divide so that larger is better; only what was measured."""
    found = {}

    def compare(name: str, slower: str, faster: str, figure: str) -> None:
        if slower in arms and faster in arms:
            found[name] = round(arms[slower][figure] / arms[faster][figure], 3)

    compare("over_plain_loop", "plain_64", "ours_best_64", "cpu_s")
    compare("over_before", "before_64", "ours_64", "cpu_s")
    compare("over_before_best", "before_best_64", "ours_best_64", "cpu_s")
    compare("over_before_best_long_prompts", "before_best_400", "ours_best_400", "cpu_s")
    for vocabulary in SHAPES:
        full, ours = f"full_{vocabulary}", f"ours_{vocabulary}"
        compare(f"output_layer_memory_fewer_{vocabulary}", full, ours, "peak_mib")
        compare(f"output_layer_time_{vocabulary}", full, ours, "cpu_s")
    if "activations" in arms:
        kept = arms["activations"]
        found["activation_memory_fewer"] = round(kept["none"] / kept["full"], 3)
    return found


if __name__ == "__main__":
    main()
