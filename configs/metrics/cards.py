"""Use and memory of the cards that a process sees, as `nvidia-smi` states them."""

from __future__ import annotations

import time

from configs.machine.gpus import query_gpus, visible_gpus

from .figures import Metric, Value

FRESH_S = 10.0  # asking the driver costs a tenth of a second of CPU
MIB = 2**20

USE = Metric(
    "nyala_gpu_utilization_ratio",
    "gauge",
    "0 to 1",
    "Share of the driver's last sample period in which a kernel ran on the card.",
    label="gpu",
)
MEMORY = Metric(
    "nyala_gpu_memory_bytes",
    "gauge",
    "bytes",
    "Memory in use on the card, by all processes.",
    label="gpu",
)
METRICS = (USE, MEMORY)


class Cards:
    """What the driver answered last; asked anew when that is older than `FRESH_S`."""

    def __init__(self) -> None:
        self._asked_at = float("-inf")
        self._values: dict[str, Value | None] = {}

    def values(self) -> dict[str, Value | None]:
        """Return the values of `METRICS`, by the cards' numbers; nothing without cards."""
        if time.monotonic() - self._asked_at > FRESH_S:
            self._values = _ask()
            self._asked_at = time.monotonic()
        return self._values


def _ask() -> dict[str, Value | None]:
    visible = set(visible_gpus())
    use, memory = dict[str, float](), dict[str, float]()
    for line in query_gpus("index,uuid,utilization.gpu,memory.used"):
        index, uuid, percent, mib = (word.strip() for word in line.split(","))
        if not visible & {index, uuid}:
            continue
        if percent.isdecimal():  # a slice of a card has no figure of its own
            use[index] = int(percent) / 100
        if mib.isdecimal():
            memory[index] = int(mib) * MIB
    return {USE.name: use, MEMORY.name: memory} if memory else {}
