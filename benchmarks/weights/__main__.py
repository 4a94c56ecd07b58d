"""Speed of weight transfer, and pauses of generation for it.

`python -m benchmarks.weights [--full] [--only ARM]`. Arms, each with all sides in this one run:

    broadcast  our whole path to one receiver, without an engine, beside one raw broadcast of as
               many bytes over gloo, and `memcpy`: as actors of the learner's machine have it
               (its memory), and as those of other machines (a group over gloo, where both ends
               share this machine's cores, and over a link of 10 Gbit/s, which needs root)
    pause      pauses of generation: ours beside a blocking broadcast of one parameter after
               the other, with the torch engine (it exchanges a shadow copy) and vLLM (in place)
    held       bytes of weights that the learner's machine holds, and what a swap copies and takes:
               actors that read the publisher's memory in place, beside ones that copy it first
    fill       CPU seconds of a fill of vLLM's second copy of a model on a CPU, by its loader and by
               our plan, beside those of the demo's sampling between two fills
    sparse     a real run at lr 1e-6 in bfloat16: bytes of sparse updates beside all bytes
    fan_out    the same path to 1..16 receivers, without engines, by memory, group and pull
    peers      pulls from a publisher with a scarce network card, alone and from each other

Progress goes to stderr; one JSON object comes last. Its `ratios` are all better when larger.
Numbers to quote come from `--full`, with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import say_since
from benchmarks.weights.fan_out import WAYS, ScarceCard, peers_fewer, pull_through
from benchmarks.weights.fill import fill
from benchmarks.weights.held import held, ratios_of
from benchmarks.weights.pause import blocking_pauses, our_pauses
from benchmarks.weights.ring import WeightRing, parameters_of
from benchmarks.weights.sparse import sparse_run
from benchmarks.weights.transport import digest, memcpy, raw_broadcast
from configs.logging import configure_logging
from lab.faults.network import SecondNetwork, obstacle

ARMS = ("broadcast", "pause", "held", "fill", "sparse", "fan_out", "peers")
MIB = 2**20
PASS_MIB = 120
"""At least so much is sent in a pass: a few versions of 4 MiB would say little."""
OVER_RAW = {
    "broadcast_over_raw": "memory",
    "group_over_raw": "group",
    "link_group_over_raw": "link_group",
}
"""Ratio -> the way of ours; it is divided by the raw broadcasts that took turns with it."""
LINK_BITS_PER_S = 10 * 10**9  # a common network card


@dataclass(frozen=True, slots=True)
class Size:
    """How much the arms measure."""

    passes: int
    """Ours and raw take turns so often; the machine may change its speed meanwhile."""
    versions: int
    """Of each pass, and more where they are short."""
    sizes_mib: tuple[int, ...]
    receivers: tuple[int, ...]
    fan_out_mib: int
    card: ScarceCard
    engines: tuple[str, ...]
    models: tuple[tuple[int, int], ...]
    """Width and layers of the models that are swapped."""
    updates: int
    preset: str
    """Of the run whose updates are measured."""
    learning_rates: tuple[float, ...]
    steps: int
    overrides: tuple[str, ...]


SHORT = Size(
    passes=2,
    versions=4,
    sizes_mib=(4, 32),
    receivers=(1, 4),
    fan_out_mib=4,
    card=ScarceCard(receivers=(4,), versions=2, mib=8, mib_per_s=16),
    engines=("torch",),
    models=((128, 4),),
    updates=8,
    preset="configs/tiny.yaml",
    learning_rates=(1e-6,),
    steps=12,
    overrides=(),
)
FULL = Size(
    passes=5,
    versions=6,
    sizes_mib=(4, 100, 1000),
    receivers=(1, 2, 4, 8, 16),
    fan_out_mib=32,
    card=ScarceCard(receivers=(1, 2, 4, 8, 16), versions=3, mib=16, mib_per_s=32),
    engines=("torch", "vllm"),
    models=((128, 4), (512, 8)),
    updates=20,
    preset="configs/tiny.yaml",
    learning_rates=(1e-6, 1e-5),
    steps=100,
    overrides=("learner.init_layers=4", "learner.init_width=128"),
)


def main() -> None:
    """Run the chosen arms and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="numbers to quote")
    parser.add_argument("--only", action="append", choices=ARMS, help="may be given again")
    chosen = parser.parse_args()
    configure_logging("benchmark", run="weights")
    machine = describe_machine()
    size = FULL if chosen.full else SHORT
    say = say_since(time.monotonic())
    measures = {
        "broadcast": broadcast,
        "pause": pause,
        "held": memory_held,
        "fill": fills,
        "sparse": sparse,
        "fan_out": fan_out,
        "peers": peers,
    }
    arms: dict[str, Any] = {}
    for name in chosen.only or ARMS:
        with tempfile.TemporaryDirectory(prefix="nyala-weights-") as folder:
            arms[name] = measures[name](Path(folder), size, say=say)
    machine["load_after"] = describe_machine()["load"]
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def broadcast(folder: Path, size: Size, *, say: Callable[[str], None]) -> dict[str, Any]:
    """One receiver: ours, raw and the parts of ours, by model size."""
    found = {}
    why_not = obstacle(limits=True)
    if why_not is not None:
        say(f"nothing over a link: {why_not}")
    for mib in size.sizes_mib:
        measured = {}
        for way in ("memory", "group"):  # one after the other: shared memory must hold either
            measured[way] = _take_turns(folder / f"{mib}-{way}", mib, size, way=way)
        if why_not is None:
            with SecondNetwork() as network:
                network.limit(LINK_BITS_PER_S)
                path = folder / f"{mib}-link"
                measured["link_group"] = _take_turns(path, mib, size, way="group", network=network)
        found[f"{mib}_mib"] = {
            **{f"{way}_s": _figures(ours) for way, (ours, _) in measured.items()},
            **{f"raw_beside_{way}_s": _figures(raw) for way, (_, raw) in measured.items()},
            "memcpy_s": _figures(memcpy(mib * MIB, passes=size.passes)),
            "digest_s": _figures(digest(mib * MIB, passes=size.passes)),
        }
        say(f"broadcast of {mib} MiB: {found[f'{mib}_mib']}")
    return found


def _take_turns(
    folder: Path, mib: int, size: Size, *, way: str, network: SecondNetwork | None = None
) -> tuple[list[float], list[float]]:
    """Deliver versions our way and by raw broadcasts, in turn; returns seconds of both."""
    ours: list[float] = []
    raw: list[float] = []
    versions = max(size.versions, PASS_MIB // mib)
    ring = _ring(folder, mib, way=way, network=network)
    try:
        for _ in range(size.passes):
            ours += [_deliver(ring, way) for _ in range(versions)]
            raw += raw_broadcast(mib * MIB, passes=versions, network=network)
    finally:
        ring.close()
    return ours, raw


def pause(folder: Path, size: Size, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds for which generation of one actor pauses for a version, by engine and model."""
    found: dict[str, Any] = {}
    for engine in size.engines:
        for width, layers in size.models:
            path = folder / f"{engine}-{width}"
            path.mkdir()
            ours, num_bytes = our_pauses(path, engine, width, layers, updates=size.updates)
            blocking, step_s = blocking_pauses(path / "model", engine, updates=size.updates)
            key = f"{engine}_{round(num_bytes / MIB)}_mib"
            found[key] = {
                "pause_s": _figures(ours),
                "blocking_s": _figures(blocking),
                "decode_step_s": _figures(step_s),
            }
            say(f"pause of {key}: {found[key]}")
    return found


def memory_held(folder: Path, size: Size, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Copies of a version on the learner's machine, by model; two actors."""
    found = {}
    for width, layers in size.models:
        measured = held(
            folder / f"{width}", receivers=2, width=width, layers=layers, updates=size.updates
        )
        found[f"{round(measured['in_place']['mib'])}_mib"] = measured
        say(f"held at width {width}: {measured}")
    return found


def fills(folder: Path, size: Size, *, say: Callable[[str], None]) -> dict[str, Any]:  # noqa: ARG001 - as every arm
    """CPU milliseconds of a fill of a model like the demo's."""
    say(f"fill: {(found := fill(folder / 'model', width=128, layers=3))}")
    return found


def sparse(folder: Path, size: Size, *, say: Callable[[str], None]) -> dict[str, Any]:
    """A run for each learning rate, with the density of its changes version by version."""
    found = {}
    for lr in size.learning_rates:
        run = sparse_run(folder, size.preset, lr=lr, steps=size.steps, overrides=size.overrides)
        found[f"lr_{lr:g}"] = run
        say(f"sparse at {lr:g}: {run['fewer']} times fewer bytes, density {run['density_median']}")
    return found


def fan_out(folder: Path, size: Size, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds until all receivers have a version, by their number: memory, group, and pull."""
    found: dict[str, Any] = {"mib": size.fan_out_mib, "engines": "none"}
    for way in ("memory", "group", "pull"):
        for receivers in size.receivers:
            path = folder / f"{way}-{receivers}"
            ring = _ring(path, size.fan_out_mib, way=way, receivers=receivers)
            try:
                seconds = [_deliver(ring, way) for _ in range(size.versions)]
            finally:
                ring.close()
            found.setdefault(way, {})[str(receivers)] = _figures(seconds)
            say(f"{way} to {receivers}: {found[way][str(receivers)]}")
    return found


def peers(folder: Path, size: Size, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds, and copies that left the publisher, by number of receivers; without engines."""
    found: dict[str, Any] = {way: {} for way in WAYS}
    for receivers in size.card.receivers:
        for way in WAYS:
            path = folder / f"{way}-{receivers}"
            found[way][str(receivers)] = measured = pull_through(path, size.card, receivers, way)
            say(f"{receivers} from {way}: {measured}")
    return found


def ratios(arms: dict[str, Any]) -> dict[str, float | None]:
    """Divide medians; None where a side is missing."""
    by_size = arms.get("broadcast", {})

    found: dict[str, float | None] = {}
    for name, figures in by_size.items():
        for ratio, way in OVER_RAW.items():
            if f"{way}_s" in figures:
                raw, ours = figures[f"raw_beside_{way}_s"], figures[f"{way}_s"]
                found[f"{ratio}_{name}"] = round(raw["median"] / ours["median"], 3)
    for name, pauses in arms.get("pause", {}).items():
        shorter = pauses["blocking_s"]["median"] / pauses["pause_s"]["median"]
        kind = "pause_shorter_shadow" if name.startswith("torch") else "pause_shorter"
        found[f"{kind}_{name}"] = round(shorter, 1)
    for name, run in arms.get("sparse", {}).items():
        found[f"sparse_bytes_fewer_{name}"] = run["fewer"]
        found[f"group_bytes_fewer_{name}"] = run["group_fewer"]
    for name, ways in arms.get("held", {}).items():
        found |= ratios_of(ways, name)
    if "fill" in arms:
        found["loader_over_plan"] = arms["fill"]["loader_over_plan"]
    return found | (peers_fewer(arms["peers"]) if "peers" in arms else {})


def _ring(
    folder: Path,
    mib: int,
    *,
    way: str,
    receivers: int = 1,
    network: SecondNetwork | None = None,
) -> WeightRing:
    host = "127.0.0.1" if network is None else network.here
    return WeightRing(
        folder,
        parameters_of(mib * MIB),
        receivers=receivers,
        network=None if network is None else network.name,
        publisher_endpoint=f"tcp://{host}:0",
        broadcast=way == "group",
        pull_from=("memory", "publisher") if way == "memory" else ("publisher",),
    )


def _deliver(ring: WeightRing, way: str) -> float:
    """Publish a version; returns seconds until all receivers have it."""
    return ring.deliver().wall_s if way == "group" else ring.pull()


def _figures(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(median(seconds), 5),
        "best": round(min(seconds), 5),
        "worst": round(max(seconds), 5),
    }


if __name__ == "__main__":
    main()
