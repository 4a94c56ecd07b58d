"""Versions that actors can pull from the publisher, whole or as updates; digests of their slices.

A version that is still being pulled stays: otherwise a slow actor would never finish one.

Invariant: holds at most two slots, so the learner always finds one to write to.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass

from broker.protocol.manifest import BASE, chunk_digests
from broker.protocol.weight_messages import CHUNK_BYTES, Pull, Ready
from broker.weights.port import SILENCE_MS
from buffer.record.episode import PolicyVersion

from .memory import WeightSlot, WeightSlots
from .updates import BroadcastPayload, SparseChain, form_for

# --------------------------------------------------------------------------------------------------
# Versions that can be pulled, whole or as updates: the current one, and one still being pulled.

PULL_IDLE_S = SILENCE_MS / 1e3
"""An actor that has not asked for so long is gone: on a slow link it asks once for each slice."""


@dataclass(frozen=True, slots=True)
class _Reader:
    version: PolicyVersion
    asked: float


class VersionsOnOffer:
    """Slots taken from the learner, and their readers.

    Args:
        slots: Slots in which the learner seals versions.
        chain: Sparse updates to the current one; None = there are none.
        clock: Monotonic seconds.
    """

    def __init__(
        self, slots: WeightSlots, chain: SparseChain | None = None, *, clock: Callable[[], float]
    ) -> None:
        self._slots = slots
        self.chain = chain
        self._clock = clock
        self._readers: dict[str, _Reader] = {}
        self._pinned: WeightSlot | None = None
        self.current: WeightSlot | None = None

    def advance(self) -> WeightSlot | None:
        """Make a sealed version the current one and return it; None if there is no newer one.

        The version before stays while an actor pulls it, unless an older one does already.

        Raises:
            OSError: No file can be opened; until the next call no version is on offer.
        """
        if self._pinned is not None and not self._is_read(self._pinned):
            self._slots.free(self._pinned)
            self._pinned = None
        if not self._slots.has_news():
            return None
        previous, self.current = self.current, None
        if previous is not None and (self._pinned is not None or not self._is_read(previous)):
            self._slots.free(previous)
            previous = None
        if previous is not None:
            self._pinned = previous
        # None if the learner is just overtaking it with a newer one, whose wake-up then comes.
        self.current = self._slots.take_sealed_slot()
        return self.current

    def read(self, actor: str, pull: Pull) -> bytes | None:
        """Return the requested slice; None if the version or the place does not exist.

        It is a slice of a version or of the base, of a version's adapter, or of a sparse update.
        """
        if pull.base not in {None, BASE}:
            return self.chain.read(pull) if self.chain is not None else None
        whole = self._whole(pull)
        place = pull.within(len(whole)) if whole is not None else None
        if whole is None or place is None:
            return None
        if place.stop == len(whole):
            self._readers.pop(actor, None)
        else:
            self._readers[actor] = _Reader(pull.version, self._clock())
        return whole[place]

    def form_for(self, slot: WeightSlot, ready: Collection[Ready]) -> BroadcastPayload:
        """Return the form in which a version travels to a group with these members."""
        updates = self.chain.updates if self.chain is not None else ()
        return form_for(slot, ready, updates=updates, base=self._slots.base())

    def _whole(self, pull: Pull) -> mmap.mmap | bytes | None:
        if pull.version == BASE:
            return self._slots.base()
        slot = self._find(pull.version)
        if slot is None:
            return None
        return slot.memory if pull.base is None else slot.adapter

    def _find(self, version: PolicyVersion) -> WeightSlot | None:
        for slot in (self.current, self._pinned):
            if slot is not None and slot.manifest.version == version:
                return slot
        return None

    def _is_read(self, slot: WeightSlot) -> bool:
        oldest = self._clock() - PULL_IDLE_S
        self._readers = {a: r for a, r in self._readers.items() if r.asked >= oldest}
        return any(r.version == slot.manifest.version for r in self._readers.values())


# --------------------------------------------------------------------------------------------------
# Digests of the slices of a version, with which actors that pull from others check each slice.
#
# They are made in a thread: with each version if some actor shares, otherwise on the first demand.


class SliceDigests:
    """The slice digests of one version, the newest for which they were made."""

    def __init__(self) -> None:
        self._made: tuple[PolicyVersion, bytes] | None = None
        self._wanted = asyncio.Event()

    def digests_of(self, version: PolicyVersion) -> bytes | None:
        """Return the digests of a version, in order; None = they are not made."""
        return self._made[1] if self._made is not None and self._made[0] == version else None

    async def make(self, slot: WeightSlot) -> None:
        """Make the slice digests of a version."""
        digests = await asyncio.to_thread(chunk_digests, slot.memory, CHUNK_BYTES)
        if self._made is None or self._made[0] < slot.manifest.version:
            self._made = slot.manifest.version, digests

    def want(self) -> None:
        """Request the slice digests of the current version."""
        self._wanted.set()

    async def make_wanted(self, current: Callable[[], WeightSlot | None]) -> None:
        """Make slice digests on each request, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            slot = current()
            if slot is not None and self.digests_of(slot.manifest.version) is None:
                await self.make(slot)
