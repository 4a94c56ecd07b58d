"""Slow environments beside instant ones: `python -m benchmarks.environments [--full]`.

A real actor with real broker, Redis and vLLM, 64 places in its engine. Arms:

    instant   one turn, and an environment that answers at once
    awaited   256 episodes in flight, each step one second in an event loop
    blocking  the same in threads

A ratio is an arm's tokens per second over those of `instant`, or over in flight x tokens of a turn
/ (generation + wait) where that is lower: no scheduler can make more. One JSON object comes last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.machine import REPOSITORY, describe_machine
from benchmarks.support.progress import say_since
from benchmarks.support.workload import THROUGHPUT, Workload, make_model

SLOTS = 64
IN_FLIGHT = 256
WAIT_S = 1.0
MAX_TOKENS = 256  # the random model ends a turn before, after 64 tokens and more in the mean
ARMS = {
    "instant": ("Awaited", 0.0),
    "awaited": ("Awaited", WAIT_S),
    "blocking": ("Blocking", WAIT_S),
}


def main() -> None:
    """Run the arms and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="numbers to quote; five minutes")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here")
    chosen = parser.parse_args()
    passes, window_s = (5, 8.0) if chosen.full else (1, 4.0)
    machine = describe_machine()
    say = say_since(time.monotonic())
    with tempfile.TemporaryDirectory(prefix="nyala-environments-") as scratch:
        folder = (chosen.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        arms = {name: measure(folder, name, passes, window_s, say) for name in ARMS}
    machine["load_after"] = describe_machine()["load"]
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def measure(
    folder: Path, name: str, passes: int, window_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run one arm."""
    from benchmarks.ring.actor_arm import PATIENT, measure_actor, ring, until_episodes  # torch

    kind, wait_s = ARMS[name]
    in_flight = IN_FLIGHT if wait_s else SLOTS
    settings = (
        *THROUGHPUT,
        *PATIENT,
        f"run.environment={REPOSITORY}/benchmarks/environments/waiting.py:{kind}",
        f"run.environment_settings={{wait_s: {wait_s}}}",
        f"run.max_completion_tokens={MAX_TOKENS}",
        "buffer.maxmemory_mb=65536",  # a bound, not a reservation
        f"actors.max_concurrent_episodes={SLOTS}",
        f"actors.max_episodes_in_flight={in_flight}",
        f"actors.environment_workers={IN_FLIGHT}",
    )
    model = make_model(Workload("environments", "demo.yaml", folder, THROUGHPUT))
    workload = replace(Workload(name, "demo.yaml", folder, settings), model=model)
    with ring(workload.settings()) as (actor, sink):
        until_episodes(sink)
        time.sleep(2 * WAIT_S)  # until as many wait as will
        windows = [measure_actor(actor, sink, (0.0, 0.0), window_s) for _ in range(passes)]
    rate = median(window.tokens_per_s for window in windows)
    tokens = median(window.tokens_per_episode for window in windows)
    say(f"{name}: {rate:.0f} tokens/s, {tokens:.0f} tokens a turn")
    return {
        "tokens_per_s": round(rate, 1),
        "tokens_per_turn": round(tokens, 1),
        "in_flight": in_flight,
        "wait_s": wait_s,
        "windows": [round(window.tokens_per_s, 1) for window in windows],
    }


def ratios(arms: dict[str, Any]) -> dict[str, float]:
    """Divide by what the same places make without waiting, or by what so many episodes can make."""
    best = arms["instant"]["tokens_per_s"]
    found: dict[str, float] = {}
    for name, arm in arms.items():
        if not arm["wait_s"]:
            continue
        tokens = arm["tokens_per_turn"]
        generation_s = SLOTS * tokens / best
        bound = arm["in_flight"] * tokens / (generation_s + arm["wait_s"])
        found[f"{name}_over_instant"] = round(arm["tokens_per_s"] / best, 3)
        found[f"{name}_over_possible"] = round(arm["tokens_per_s"] / min(best, bound), 3)
        found[f"{name}_bound_tokens_per_s"] = round(bound, 1)
    return found


if __name__ == "__main__":
    main()
