"""Reading back of the weights that an engine has stored, rarely enough to cost almost nothing.

The probe compares results of an engine, and so cannot see a tensor that lags by a small step. The
engine's storage can be compared value by value with the file from which it was loaded, and that
file with its checksum. No token is sampled during a reading. So after a reading that took t seconds
the next one comes with the first swap after t / `SHARE`.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from actors.engine.engine import StagedWeights
from broker.protocol.manifest import checksum_of
from configs.errors import WeightsError

from .counters import WeightCounters

SHARE = 0.01
"""Share of an engine's time that may be spent on reading."""


class Readable(Protocol):
    """The part of `Engine` that is used here."""

    async def read_back(self, staged: StagedWeights) -> list[str] | None: ...


class StorageCheck:
    """Decides when an engine's storage is read, and compares it.

    Args:
        engine: Engine whose storage is read.
        counters: Counts readings.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        engine: Readable,
        counters: WeightCounters,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._clock = clock
        self._due = clock()
        self._is_readable = True

    async def fault(self, staged: StagedWeights, *, is_again: bool) -> str:
        """Return the fault of the weights that were swapped in; empty = no fault is known.

        Usually nothing is read, as a reading is not due. An engine that cannot be read is not asked
        again.

        Args:
            staged: The version that was swapped in.
            is_again: The weights before these were wrong: read now.
        """
        begun = self._clock()
        if not self._is_readable or (begun < self._due and not is_again):
            return ""
        try:
            stale = await self._engine.read_back(staged)
            fault = _text(staged, stale) if stale else await asyncio.to_thread(_file_fault, staged)
        except (WeightsError, OSError) as error:
            structlog.get_logger().info(
                "weights were gone before they were read", reason=str(error)
            )
            return ""
        if stale is None:
            self._is_readable = False
            structlog.get_logger().info("stored weights cannot be read back; the probe remains")
            return ""
        took_s = self._clock() - begun
        self._due = begun + took_s / SHARE
        self._counters.read_backs += 1
        self._counters.read_back_s += took_s
        if not staged.is_whole():  # overwritten meanwhile: the comparison was with another version
            return ""
        self._counters.storage_mismatches += bool(fault)
        return fault


def _text(staged: StagedWeights, stale: list[str]) -> str:
    return (
        f"the engine has stored other values of weights {tuple(staged.manifest.version)} than it "
        f"was given, in {stale[:3]} ({len(stale)} in all)"
    )


def _file_fault(staged: StagedWeights) -> str:
    with staged.path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with mapping:
        if checksum_of(mapping) == staged.manifest.checksum:
            return ""
    return (
        f"the file of weights {tuple(staged.manifest.version)} has another checksum after the swap "
        "than before, so this machine's memory changes by itself"
    )
