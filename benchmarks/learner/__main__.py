"""Speed and memory of the learner's step, beside loops that one would write first.

`python -m benchmarks.learner [--full] [--only FIGURE]`. Figures, each with all its arms in this one
run, in turns, one thread, CPU seconds, and a process of its own for each measurement:

    step          a batch through our step, through a padded loop of plain transformers with full
                  logits, and this project's step at 5cf2266, default and best budget of tokens;
                  for short prompts and for longer ones than the answers; and, where `trl` is
                  installed, the same batch through the training step of TRL's GRPO trainer
    output_layer  log-probs, entropies and gradients from hidden states, beside full logits
    activations   bytes that one more layer keeps per token, by `learner.activation_checkpointing`,
                  and the time of a step
    lockstep      time that ranks need for a batch as it is dealt, beside the least; computed
    small         the demo's step, 256 short episodes of a tiny model: plain, with torch's own
                  products, under FSDP2, compiled, and by TRL's trainer where `trl` is installed
    save          a background save beside a synchronous one, and the training meanwhile

Progress goes to stderr; one JSON object comes last. Its `ratios` are all better when larger.
Numbers to quote come from `--full`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.learner.arm import output_layer, step
from benchmarks.learner.save import save
from benchmarks.learner.small import small_arms
from benchmarks.learner.trl_loop import HAS_TRL
from benchmarks.learner.turns import Arm, take_turns
from benchmarks.support.lockstep import least_lockstep, made_sizes, time_of
from benchmarks.support.machine import describe_machine
from console.run.decoder_sizes import ModelShape
from learner.data.dealing import deal_episodes
from learner.model.sequence_cost import SequenceCost

FIGURES = ("step", "output_layer", "activations", "lockstep", "small", "save")
DEFAULT_BUDGET, BEST_BUDGET = 16384, 2048
LOCKSTEP = {8: (8, 512), 64: (64, 1024)}
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


class Size(NamedTuple):
    """How much is measured."""

    rounds: int
    groups: int
    small_steps: int


SHORT = Size(rounds=1, groups=1, small_steps=20)
FULL = Size(rounds=5, groups=4, small_steps=60)
PROMPTS = ((64, 192), (400, 600))


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
        arms |= take_turns(activation_arms(size), size.rounds)
    if "lockstep" in figures:
        arms |= {f"lockstep_{ranks}": waiting(*shape) for ranks, shape in LOCKSTEP.items()}
    if "small" in figures:
        arms |= take_turns(small_arms(size.small_steps), size.rounds)
    if "save" in figures:
        arms |= take_turns([Arm("save", save)], size.rounds)
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def step_arms(size: Size) -> list[Arm]:
    """Our step and what it is compared with, for each length of prompts."""
    return [
        Arm(f"{name}_{prompts[0]}", step, (kind, size.groups, budget, *prompts))
        for prompts in PROMPTS
        for name, kind, budget in (
            ("plain", "plain", 0),
            *([("trl", "trl", 0)] if HAS_TRL else []),
            ("before", "before", DEFAULT_BUDGET),
            ("before_best", "before", BEST_BUDGET),
            ("ours", "ours", DEFAULT_BUDGET),
            ("ours_best", "ours", BEST_BUDGET),
        )
    ]


def output_layer_arms() -> list[Arm]:
    """Our output layer in two passes and in one, the one before, and full logits."""
    return [
        Arm(f"{name}_{vocabulary}", output_layer, (name, *shape))
        for vocabulary, shape in SHAPES.items()
        for name in ("full", "before", "ours", "in_forward")
    ]


def activation_arms(size: Size) -> list[Arm]:
    """A step that keeps all activations, and one that keeps a layer's input."""
    arguments = (size.groups, DEFAULT_BUDGET, *PROMPTS[0])
    return [
        Arm("kept", step, ("ours", *arguments)),
        Arm("checkpointed", step, ("checkpointed", *arguments)),
    ]


def waiting(ranks: int, episodes: int) -> dict[str, float]:
    """Time of a 4B model's ranks for a batch as it is dealt, and the least; in units of cost."""
    cost = SequenceCost.from_config(QWEN3_4B)
    budget = {"ranks": ranks, "microbatch_tokens": DEFAULT_BUDGET}
    sizes = made_sizes(episodes, prompts=PROMPTS[0])
    took = time_of(deal_episodes(sizes, cost, **budget), sizes, cost)
    return {"took": took, "least": least_lockstep(sizes, cost, **budget)}


def kept_bytes() -> dict[str, float]:
    """Bytes per token and layer of a model of 4B in bfloat16, as `nyala up --dry-run` has them.

    `tests/learner/model/test_activation_checkpointing.py` counts them in a real layer.
    """
    shape = ModelShape.from_config(QWEN3_4B)
    return {kind: float(shape.kept(kind, 2)) for kind in ("none", "selective", "full")}


def ratios(arms: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Divide so that larger is better; only what was measured."""
    found = {}

    def compare(name: str, slower: str, faster: str, figure: str) -> None:
        if slower in arms and faster in arms:
            found[name] = round(arms[slower][figure] / arms[faster][figure], 3)

    for prompts, suffix in ((64, ""), (400, "_long_prompts")):
        compare(f"over_plain_loop{suffix}", f"plain_{prompts}", f"ours_{prompts}", "cpu_s")
        compare(f"over_trl{suffix}", f"trl_{prompts}", f"ours_{prompts}", "cpu_s")
        compare(f"over_before{suffix}", f"before_{prompts}", f"ours_{prompts}", "cpu_s")
        best = f"before_best_{prompts}", f"ours_best_{prompts}"
        compare(f"over_before_best{suffix}", *best, "cpu_s")
    for vocabulary in SHAPES:
        full, ours = f"full_{vocabulary}", f"ours_{vocabulary}"
        compare(f"output_layer_memory_fewer_{vocabulary}", full, ours, "peak_mib")
        compare(f"output_layer_time_{vocabulary}", full, ours, "cpu_s")
        forward = f"in_forward_{vocabulary}"
        compare(f"gradient_in_forward_memory_fewer_{vocabulary}", full, forward, "peak_mib")
        compare(f"gradient_in_forward_time_{vocabulary}", full, forward, "cpu_s")
    if "activations" in arms:
        kept = arms["activations"]
        found["activation_memory_fewer"] = round(kept["none"] / kept["full"], 3)
    compare("activation_time", "kept", "checkpointed", "cpu_s")
    for kind in ("mkl", "sharded", "compiled", "trl"):
        compare(f"small_over_{kind}", f"small_{kind}", "small_plain", "cpu_s")
    for name in (f"lockstep_{ranks}" for ranks in LOCKSTEP):
        if name in arms:
            found[name] = round(arms[name]["least"] / arms[name]["took"], 3)
    if "save" in arms:
        of_save = arms["save"]
        found["save_blocks_less"] = round(of_save["synchronous_s"] / of_save["blocked_s"], 3)
        without = of_save["tokens_per_s_without"]
        found["tokens_beside_save"] = round(of_save["tokens_per_s"] / without, 3)
    return found


if __name__ == "__main__":
    main()
