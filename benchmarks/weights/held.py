"""Bytes of weights on the learner's machine, and what a swap copies: read in place, or copied.

Before, an actor of this machine copied each version into a staging file of its own and loaded it
from there. That is the arm `copied`: today's path with such a copy put back by the benchmark. Both
have engines (torch) that generate all the time.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.shared_files import shared_files
from benchmarks.weights.pause import NUM_REQUESTS, _generating, _probe, _request, _save_model
from benchmarks.weights.pause import _stepper as stepper_of
from benchmarks.weights.ring import WeightRing

WAYS = ("in_place", "copied")
STEPS = 30


def held(
    folder: Path, *, receivers: int, width: int, layers: int, updates: int
) -> dict[str, dict[str, float]]:
    """Publish to actors of this machine; returns figures of both ways."""
    found = {}
    for way in WAYS:
        path = folder / way
        path.mkdir(parents=True)
        model = _save_model(path / "model", width, layers)
        step_s = decode_step(path / "model")
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        ring = WeightRing(
            path,
            model,
            receivers=receivers,
            engine=partial(_generating, "torch", path / "model"),
            pull_from=("memory", "publisher"),
            broadcast=False,
            copies=way == "copied",
            probe=_probe,
        )
        try:
            seconds = [ring.pull() for _ in range(updates)]
            swaps = ring.swaps
            counted = bytes_held(ring.pids())
        finally:
            ring.close()
        pause_s = median(swap["pause_s"] for swap in swaps)
        found[way] = {
            "mib": round(num_bytes / 2**20, 1),
            "receivers": receivers,
            "copies_held": round(counted["allocated"] / num_bytes, 2),
            "copies_counted_by_kernel": round(counted["pss"] / num_bytes, 2),
            "copies_of_each_actor": round(counted["of_actors"] / receivers / num_bytes, 2),
            "bytes_copied_per_swap": median(swap["copied_bytes"] for swap in swaps),
            "served_s": round(median(seconds), 4),
            "pause_s": round(pause_s, 5),
            "pause_decode_steps": round(pause_s / step_s, 4),
        }
    return found


def decode_step(model: Path) -> float:
    """Return seconds of one decode step of an engine by itself."""
    stepper: Any = stepper_of("torch", model)
    stepper.start()
    for key in range(NUM_REQUESTS):
        stepper.admit(key, _request(key), 2 * STEPS)
    stepper.step()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        stepper.step()
        seconds.append(time.perf_counter() - began)
    stepper.close()
    return median(seconds)


def bytes_held(pids: dict[int, bool]) -> dict[str, int]:
    """Count files of weights that processes have mapped.

    Args:
        pids: Processes, and whether each is an actor's.
    """
    pss, files, of_actors = 0, set[Path](), set[Path]()
    for pid, is_actor in pids.items():
        for path, count in shared_files(pid).items():
            pss += count["Pss"]
            files.add(path)
            if is_actor and "-staging-" in str(path):
                of_actors.add(path)
    return {"pss": pss, "allocated": _allocated(files), "of_actors": _allocated(of_actors)}


def _allocated(files: set[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in files if path.exists())


def ratios_of(found: dict[str, dict[str, float]], name: str) -> dict[str, float | None]:
    """Divide what was copied by what is read in place; better when larger."""
    before, after = found["copied"], found["in_place"]
    return {
        f"copies_fewer_{name}": round(before["copies_held"] / after["copies_held"], 2),
        f"served_sooner_{name}": round(before["served_s"] / after["served_s"], 2),
    }
