"""A version to 1..16 receivers that pull it, with and without pulling from each other.

Run as `python -m benchmarks.weight_fan_out [--full]`. The publisher's network card is a proxy of
limited speed, because on one machine nothing else would make it scarce; receivers reach each other
without one. They have no engines, and all run on this machine's cores, which CURVE then needs: what
many of them take longer is that.

Progress goes to stderr; one JSON object comes last: seconds until all have a version, and copies of
it that have left the publisher, repetitions included. `ratios` are all better when larger.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.progress import say_since
from benchmarks.uplink import Uplink
from benchmarks.weight_ring import WeightRing, parameters_of
from configs.logging import configure_logging

MIB = 2**20
WAYS = ("publisher", "peers")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    receivers: tuple[int, ...]
    versions: int
    mib: int
    mib_per_s: int
    """Of the publisher's network card."""


SHORT = Size(receivers=(1, 4), versions=2, mib=8, mib_per_s=16)
FULL = Size(receivers=(1, 2, 4, 8, 16), versions=3, mib=16, mib_per_s=32)


def main() -> None:
    """Measure both ways and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="numbers to quote")
    size = FULL if parser.parse_args().full else SHORT
    configure_logging("benchmark", run="weights")
    machine = describe_machine()
    say = say_since(time.monotonic())
    found: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
    for receivers in size.receivers:
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="nyala-fan-out-") as folder:
                found[way][str(receivers)] = measured = fan_out(Path(folder), size, receivers, way)
            say(f"{receivers} from {way}: {measured}")
    machine["load_after"] = describe_machine()["load"]
    setting = {"mib": size.mib, "mib_per_s": size.mib_per_s, "engines": "none"}
    print(json.dumps({"arms": found, "ratios": ratios(found), **setting, "machine": machine}))


def fan_out(folder: Path, size: Size, receivers: int, way: str) -> dict[str, float]:
    """Let so many pull some versions; returns medians."""
    links: list[Uplink] = []

    def limited(endpoint: str) -> str:
        links.append(Uplink(endpoint, bytes_per_s=size.mib_per_s * MIB))
        return links[-1].endpoint

    ring = WeightRing(
        folder,
        parameters_of(size.mib * MIB),
        receivers=receivers,
        shares=way == "peers",
        route=limited,
        broadcast=False,
    )
    try:
        ring.pull()  # until now not all were there to be peers
        seconds, copies = [], []
        for _ in range(size.versions):
            before = links[0].num_bytes
            seconds.append(ring.pull())
            copies.append((links[0].num_bytes - before) / (size.mib * MIB))
    finally:
        ring.close()
        for link in links:
            link.close()
    return {"seconds": round(median(seconds), 2), "copies": round(median(copies), 2)}


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Divide what the publisher alone takes by what it takes with peers."""
    named = {}
    for receivers, alone in found["publisher"].items():
        for figure in ("seconds", "copies"):
            shared = found["peers"][receivers][figure]
            named[f"peers_fewer_{figure}_{receivers}"] = round(alone[figure] / shared, 2)
    return named


if __name__ == "__main__":
    main()
