"""Simulate by hand: `python -m tests.simulation --seed 7 --actors 256 --hours 1`.

`--brief 500` plays short simulations instead, `--brief 200 --agents` such with live agents.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.simulation.scenario import Scenario, brief, brief_agents
from tests.simulation.simulation import simulate

COUNTED = ("death", "rewinds", "agents", "answers heard", "conversations lost")


def run_brief(first: int, count: int, *, has_agents: bool) -> None:
    """Play short simulations of successive seeds; the first that fails ends it."""
    began, found = time.monotonic(), Counter[str]()
    scenario, flag = (brief_agents, " --agents") if has_agents else (brief, "")
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                counts = simulate(scenario(seed), Path(folder)).figures["counts"]
            except BaseException as error:
                error.add_note(f"in `python -m tests.simulation --brief 1 --seed {seed}{flag}`")
                raise
        found.update({k: v for k, v in counts.items() if k.startswith(COUNTED)})
    took_s = time.monotonic() - began
    print(json.dumps({"seeds": count, "wall_s": round(took_s, 1), **found}, indent=2))


def main() -> None:
    """Run one simulation and print what happened as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actors", type=int, default=16)
    parser.add_argument("--hours", type=float, default=1.0, help="simulated hours with faults")
    parser.add_argument("--brief", type=int, default=0, help="so many short simulations instead")
    parser.add_argument("--agents", action="store_true", help="the short ones with live agents")
    options = parser.parse_args()
    if options.brief:
        run_brief(options.seed, options.brief, has_agents=options.agents)
        return
    seconds = options.hours * 3600
    scenario = Scenario(seed=options.seed, actors=options.actors, faulty_s=seconds)
    if options.actors > 32:
        scenario = replace(
            scenario,
            groups_per_batch=options.actors // 4,
            poisoned=499,
            step_s=2.0,
            train_s=20.0,
            snapshot_s=5.0,
            check_every_s=30.0,
            capacity=4,
        )
    began, clock = time.monotonic(), time.monotonic

    def show(now: float) -> None:
        share = min(1.0, now / seconds)
        bar = ("#" * int(40 * share)).ljust(40, ".")
        print(f"\r[{bar}] {now:7.0f} s  wall {clock() - began:5.0f} s", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        result = simulate(scenario, Path(folder), show)
    print(file=sys.stderr)
    summary = {
        "seed": scenario.seed,
        "actors": scenario.actors,
        "virtual_s": round(result.virtual_s, 1),
        "wall_s": round(clock() - began, 1),
        **result.figures,
        "trace_hash": result.trace_hash,
    }
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
