"""`weights.jsonl` in the folder of a run: each version that was sealed, and its delivery.

A `sealed` line comes from the training thread, a `delivered` line from the one that watches the
publisher. Lines are only ever added, also over restarts of the learner: a version is never
overwritten, so the file has one digest for each (lineage, step).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from broker.protocol.manifest import WeightManifest

from .server import Sent

FILE_NAME = "weights.jsonl"


class WeightLog:
    """Appends to the file. Producer: learner rank 0. Consumers: `nyala weights`, the summary."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE_NAME

    def sealed(self, manifest: WeightManifest, *, held_s: float) -> None:
        """Record a version; to gather and probe it held up the learner for `held_s`."""
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

    def delivered(self, sent: Sent) -> None:
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

    None if no actor has reported yet. Of the newest life of the publisher.
    """
    found = None
    for line in read_weight_log(folder):
        if line["event"] == "delivered" and line["served_s"]:
            found = line["paused_s"] / line["served_s"]
    return found
