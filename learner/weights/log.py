"""`weights.jsonl` in the folder of a run: each version that was sealed, and its delivery.

A `sealed` line comes from the training thread, a `delivered` line from the one that watches the
publisher. Lines are only ever added, also over restarts of the learner: a version is never
overwritten, so the file has one digest for each (lineage, step).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from broker.protocol.manifest import WeightManifest
from buffer.record.episode import PolicyVersion

FILE_NAME = "weights.jsonl"


@dataclass(frozen=True, slots=True)
class VersionDelivery:
    """Delivery of one version. Producer: the publisher. Consumer: `weights.jsonl`."""

    version: PolicyVersion
    actors: int
    """Live actors when the version was announced."""
    members: int
    """Live actors that were members of its weight epoch; the others pull."""
    epoch: int
    """Number of the weight epoch; 0 = none."""
    is_complete: bool
    """Whether all members confirmed it."""
    wall_s: float
    """Seconds from the announcement to the last confirmation."""
    density: float = 1.0
    """Share of changed elements; 1 = not compared."""
    member_bytes: int = 0
    """Bytes that each member received by its weight epoch, in the form of its last try."""
    sparse_bytes: int = 0
    """Bytes of the sparse update; 0 = there is none."""
    adapter_bytes: int = 0
    """Bytes of the adapter; 0 = all of the model is trained."""
    paused_s: float = 0.0
    """Time for which generation has paused for swaps, over all actors of this publisher's life."""
    served_s: float = 0.0
    """Time for which those actors have had weights to serve."""


class WeightLog:
    """Appends to `weights.jsonl`. Producer: learner rank 0. Consumers: `nyala weights`, summary."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE_NAME

    def sealed(self, manifest: WeightManifest, *, held_s: float) -> None:
        """Record a version; gathering and probing it stopped the learner for `held_s`."""
        self._append(
            "sealed",
            manifest.version,
            {
                "digest": manifest.digest,
                "num_bytes": manifest.num_bytes,
                "dtype": manifest.tensors[0].dtype,
                "held_s": round(held_s, 6),
            },
        )

    def delivered(self, sent: VersionDelivery) -> None:
        """Record the delivery of a version."""
        figures = asdict(sent)
        del figures["version"]
        self._append("delivered", sent.version, figures)

    def _append(self, event: str, version: tuple[int, int], figures: Mapping[str, object]) -> None:
        line = {"event": event, "version": list(version), "time": time.time(), **figures}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_weight_log(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's log; one that a crash cut off is left out."""
    path = folder / FILE_NAME
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("event") in {"sealed", "delivered"}:
            yield line


def paused_fraction(folder: Path) -> float | None:
    """Return the share of time for which generation paused for swaps, over all actors.

    The newest life of the publisher counts. None if no actor has reported yet.
    """
    fraction = None
    for line in read_weight_log(folder):
        if line["event"] == "delivered" and line["served_s"]:
            fraction = line["paused_s"] / line["served_s"]
    return fraction
