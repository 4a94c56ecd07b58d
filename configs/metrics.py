"""Metrics of a role: descriptions, histograms, addresses that serve them, health, use of GPUs."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from .machine import query_gpus, visible_gpus

# --------------------------------------------------------------------------------------------------
# Descriptions of metrics, and histograms: what a role counts, without the library that shows it.
#
# A role keeps plain numbers; `metrics_server.py` turns them into Prometheus' text when it is asked.


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a role's page; `nyala metrics` prints all of them."""

    name: str
    """By Prometheus' conventions: prefix, base unit, `_total` of a counter."""
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    meaning: str
    label: str = ""
    """Name of its label; empty = it has none."""


@dataclass(slots=True)
class Histogram:
    """Counts of observations by upper bound. One thread observes, another may read."""

    bounds: Sequence[float]
    """Ascending; above the last one everything counts together."""
    counts: list[int] = field(init=False)
    """Observations in each bucket, the one above the last bound included."""
    total: float = 0.0
    """Sum of all observations."""

    def __post_init__(self) -> None:
        """Set all counts to zero."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation in its bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class BusyTime:
    """Seconds in which there was work, summed. One thread marks, another may read.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sum_s = 0.0
        self._since: float | None = None

    def mark(self, *, is_busy: bool) -> None:
        """Note whether there is work from now on."""
        now, since = self._clock(), self._since
        if since is not None:
            self._sum_s += now - since
        self._since = now if is_busy else None

    @property
    def seconds(self) -> float:
        """Seconds of work up to now."""
        sum_s, since = self._sum_s, self._since
        return sum_s if since is None else sum_s + self._clock() - since


Value: TypeAlias = float | Histogram | Mapping[str, float]
"""Value of a metric; a mapping has one for each value of its label."""
Values: TypeAlias = Mapping[str, Value | None]
"""Metric's name -> its value; None, or no entry: there is no value yet."""

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Bounds for waits and steps: alerts ask for 60 s."""


# --------------------------------------------------------------------------------------------------
# Addresses of metrics, `http://HOST:PORT`: taken apart, and one for each actor of a machine.

TARGETS = "metrics"
"""Folder of a run with the addresses at which its processes serve."""


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split an address into host and port."""
    parts = urlsplit(endpoint)
    return parts.hostname or "", parts.port or 0


def endpoint_of(endpoint: str, number: int) -> str:
    """Return the address of actor `number` of a machine: that many ports higher; port 0 stays."""
    host, port = host_and_port(endpoint)
    if not port:
        return endpoint
    return f"http://{f'[{host}]' if ':' in host else host}:{port + number}"


# --------------------------------------------------------------------------------------------------
# Health of a process, as others see it: whether its loop turns, and whether it can work.
#
# Asked from the thread of the HTTP server, so that a loop that hangs cannot answer for itself.

BEAT_S = 1.0
LOOP_STALLED_S = 60.0  # imports of an engine, which hold every thread up, take less


class Pulse:
    """The last turn of a loop. Alive from the start until the first turn, however long that takes.

    Args:
        limit_s: Longest time between two turns.
        clock: Seconds.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._at: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the loop has had a turn."""
        return self._at is not None

    def beat(self) -> None:
        """Note that a turn has ended now."""
        self._at = self._clock()

    async def keep(self) -> None:
        """Note a turn of the running event loop now and then, until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)

    def fault(self) -> str | None:
        """Describe a loop that hangs; None while it turns."""
        silent_s = 0.0 if self._at is None else self._clock() - self._at
        if silent_s <= self._limit_s:
            return None
        return f"the loop has not turned for {silent_s:.0f} s, limit {self._limit_s:g} s"


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one process."""

    pulse: Pulse
    waits_for: Callable[[], str | None]
    """Names what the process waits for before it can work; None = only for work."""

    def not_alive(self) -> str | None:
        """Return the reason to end the process; None if there is none."""
        return self.pulse.fault()

    def not_ready(self) -> str | None:
        """Return the reason why the process cannot be relied on now; None if it can."""
        if (fault := self.pulse.fault()) is not None:
            return fault
        waits_for = self.waits_for()
        return None if waits_for is None else f"waits for {waits_for}"


# --------------------------------------------------------------------------------------------------
# Use and memory of the cards that a process sees, as `nvidia-smi` states them.

FRESH_S = 10.0  # asking the driver costs a tenth of a second of CPU
MIB = 2**20

CARD_USE = Metric(
    "nyala_gpu_utilization_ratio",
    "gauge",
    "0 to 1",
    "Share of the driver's last sample period in which a kernel ran on the card.",
    label="gpu",
)
CARD_MEMORY = Metric(
    "nyala_gpu_memory_bytes",
    "gauge",
    "bytes",
    "Memory in use on the card, by all processes.",
    label="gpu",
)
CARD_METRICS = (CARD_USE, CARD_MEMORY)


class Cards:
    """The driver's last answer, which is renewed when it is older than `FRESH_S`."""

    def __init__(self) -> None:
        self._asked_at = float("-inf")
        self._values: dict[str, Value | None] = {}

    def values(self) -> dict[str, Value | None]:
        """Return the values of `CARD_METRICS`, by the cards' numbers; nothing without cards."""
        if time.monotonic() - self._asked_at > FRESH_S:
            self._values = _query_cards()
            self._asked_at = time.monotonic()
        return self._values


def _query_cards() -> dict[str, Value | None]:
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
    return {CARD_USE.name: use, CARD_MEMORY.name: memory} if memory else {}
