"""A version to 1..16 receivers that pull it, with and without pulling from each other.

The publisher's network card is a proxy of limited speed, because on one machine nothing else would
make it scarce; receivers reach each other without one. They have no engines, and all run on this
machine's cores, which CURVE then needs: what many of them take longer is that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.uplink import Uplink
from benchmarks.weights.ring import WeightRing, parameters_of

MIB = 2**20
WAYS = ("publisher", "peers")


@dataclass(frozen=True, slots=True)
class ScarceCard:
    """How much goes through it, and to how many."""

    receivers: tuple[int, ...]
    versions: int
    mib: int
    mib_per_s: int
    """Of the publisher's network card."""


def pull_through(folder: Path, size: ScarceCard, receivers: int, way: str) -> dict[str, float]:
    """Let so many pull some versions; returns medians: seconds until all have one, and copies of it
    that have left the publisher, repetitions included.
    """
    links: list[Uplink] = []

    def limited(endpoint: str) -> str:
        links.append(Uplink(endpoint, bytes_per_s=size.mib_per_s * MIB))
        return links[-1].endpoint

    ring = WeightRing(
        folder,
        parameters_of(size.mib * MIB),
        receivers=receivers,
        share_endpoint="tcp://127.0.0.1:0" if way == "peers" else None,
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


def peers_fewer(found: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Return the time without peers over the time with peers, by number of receivers."""
    named: dict[str, float | None] = {}
    for receivers, alone in found["publisher"].items():
        for figure in ("seconds", "copies"):
            shared = found["peers"][receivers][figure]
            named[f"peers_fewer_{figure}_{receivers}"] = round(alone[figure] / shared, 2)
    return named
