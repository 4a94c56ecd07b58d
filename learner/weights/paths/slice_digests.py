"""Digests of the slices of a version, by which those that pull from others check each one.

Made in a thread: with each version if some actor shares, otherwise when one first needs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.protocol.manifest import chunk_digests
from broker.protocol.weight_messages import CHUNK_BYTES
from buffer.record.episode import PolicyVersion
from learner.weights.slots import Slot


class SliceDigests:
    """Those of one version, the newest that they were made of."""

    def __init__(self) -> None:
        self._made: tuple[PolicyVersion, bytes] | None = None
        self._wanted = asyncio.Event()

    def of(self, version: PolicyVersion) -> bytes | None:
        """Return the digests of a version, in order; None = they are not made."""
        return self._made[1] if self._made is not None and self._made[0] == version else None

    async def make(self, slot: Slot) -> None:
        """Make those of a version."""
        digests = await asyncio.to_thread(chunk_digests, slot.memory, CHUNK_BYTES)
        if self._made is None or self._made[0] < slot.manifest.version:
            self._made = slot.manifest.version, digests

    def want(self) -> None:
        """Have those of the current version made."""
        self._wanted.set()

    async def make_wanted(self, current: Callable[[], Slot | None]) -> None:
        """Make them whenever somebody wants them, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            slot = current()
            if slot is not None and self.of(slot.manifest.version) is None:
                await self.make(slot)
