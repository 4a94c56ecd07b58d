"""Figures of one card, in ten minutes and more: `python -m benchmarks.card [--only STAGE]`.

For a machine with a card and `requirements/cuda.lock`. Stages, each a process of its own with a
limit, whose log lies in the folder; one that fails costs its own figures:

    machine    the card's name, a matrix product, copies to and from host memory, digests
    gpu_tests  `tests/gpu` whole: passed, failed, and the table that it prints
    learner    the learner's step beside transformers with liger-kernel, in turns: Qwen3-4B's shapes
               with equal rows in microbatches of 16k and 32k tokens and with mixed lengths, padded
               and packed, and those of 0.6B with nothing computed again; kernels by group
    engine     decoding beside vLLM's bare `LLMEngine`, and pauses for new weights (swaps), under
               CUDA graphs
    ring       `nyala up`: the first batch by stages of the start, tokens a second, the learner's
               waits and pauses, with cold caches and with warm ones

liger-kernel is in no lock: `uv pip install --no-deps liger-kernel` (or pip) into `.venv`; without
it the loop beside ours is transformers alone. `--model FOLDER` names a chat model, such as
SmolLM2-135M-Instruct, which engine and ring take: without one it is random weights and the demo.

Progress goes to stderr; one JSON object comes last. Its `ratios` are all better when larger.
`--device cpu --tiny` shows on any machine that the code runs; its figures are worth nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.card.stage import Asked, add_flags, asked_by, run_stage
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import say_since

LIMITS_S = {"machine": 90.0, "gpu_tests": 600.0, "learner": 300.0, "engine": 300.0, "ring": 480.0}


def main() -> int:
    """Run the chosen stages and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--only", action="append", choices=LIMITS_S, help="may be given again")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nyala-card-") as scratch:
        folder = chosen.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        asked = asked_by(chosen, folder)
        arms = measure(asked, chosen.only or list(LIMITS_S))
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": describe_machine()}))
    return 1 if any("fault" in stage for stage in arms.values()) else 0


def measure(asked: Asked, names: list[str]) -> dict[str, Any]:
    """Run stages one after the other."""
    say = say_since(time.monotonic())
    arms: dict[str, Any] = {}
    for name in names:
        say(f"{name}: at most {LIMITS_S[name]:g} s")
        arms[name] = run_stage(name, asked, limit_s=LIMITS_S[name], say=say)
    return arms


def ratios(arms: dict[str, Any]) -> dict[str, float]:
    """Divide ours by the best of what it is compared with; only what was measured."""
    found = {}

    def compare(name: str, ours: dict[str, Any] | None, *others: dict[str, Any] | None) -> None:
        rates = [other["tokens_per_s"] for other in others if other]
        if ours and rates:
            found[name] = round(ours["tokens_per_s"] / max(rates), 3)

    learner, engine, ring = (arms.get(name, {}) for name in ("learner", "engine", "ring"))
    for name in ("4b_16k", "4b_32k", "4b_mixed", "0.6b"):
        for beside in ("liger", "transformers"):
            others = [learner.get(f"{beside}_{name}{way}") for way in ("", "_padded", "_packed")]
            compare(f"learner_over_{beside}_{name}", learner.get(f"ours_{name}"), *others)
    for name in ("engine", "engine_short"):
        compare(f"{name}_over_bare_engine", engine.get(name), engine.get(f"bare_{name}"))
    cold, alone = ring.get("cold"), engine.get("engine_short")
    if cold and alone and cold["model"] == alone["model"]:
        compare("ring_over_engine", cold, alone)
    return found


if __name__ == "__main__":
    sys.exit(main())
