"""Sparse updates between versions, and the form in which a version travels to a group.

    v3 ──link──▶ v4 ──link──▶ v5 (current)      an actor at v3 pulls both links, one at v2 all bytes

The publisher compares each version with the one before it, of which it keeps a copy. All bytes
of the current version are always on offer too, so a chain needs no keyframes to begin at: it ends
where its links together are as long as a version. A version of which too much has changed begins
a new chain.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from broker.protocol.manifest import BASE, SparseLink, WeightManifest, chunk_digests
from broker.protocol.weight_messages import CHUNK_BYTES, Pull, Ready
from broker.weights.sparse import apply_changes, elements, encode_changes

from .memory import WeightSlot

# --------------------------------------------------------------------------------------------------
# Chain of sparse updates between the last versions.

MAX_LINKS = 64
"""An actor further behind gains little: changes overlap, and each link costs a round trip."""


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Difference of a version from the one before it."""

    density: float
    """Share of changed elements; a lower bound where the comparison was given up."""
    num_bytes: int
    """Bytes of the sparse update; 0 = there is none."""


@dataclass(frozen=True, slots=True)
class SparseUpdate:
    """A link of the chain with its bytes."""

    link: SparseLink
    payload: bytes
    slice_digests: bytes
    """Digests of the slices of the payload, in order."""


class SparseChain:
    """Links between versions. `advance` runs in a thread, all else on the event loop."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._before: WeightManifest | None = None
        self.updates: tuple[SparseUpdate, ...] = ()
        """The chain, oldest link first; each begins where the one before it ends."""

    def advance(self, slot: WeightSlot) -> WeightChange | None:
        """Compare a newer version with the last one; None if there is none to compare with."""
        before, new_one = self._before, slot.manifest
        self._before = new_one
        if before is None or len(self._held) != new_one.num_bytes:
            self._held, self.updates = bytearray(slot.memory), ()
            return None
        dtype = new_one.tensors[0].dtype
        old, new = elements(self._held, dtype), elements(slot.memory, dtype)
        update, num_changed = encode_changes(old, new)
        density = num_changed / len(new)
        if update is None:
            old[:] = new
            self.updates = ()
            return WeightChange(density, 0)
        apply_changes(update, old)
        link = SparseLink(before.version, new_one.version, len(update))
        newest = SparseUpdate(link, update, chunk_digests(update, CHUNK_BYTES))
        self.updates = _trimmed((*self.updates, newest), new_one.num_bytes)
        return WeightChange(density, len(update))

    def read(self, pull: Pull) -> bytes | None:
        """Return the requested slice; None if the link or the place does not exist."""
        for update in self.updates:
            if (update.link.base, update.link.version) == (pull.base, pull.version):
                place = pull.within(len(update.payload))
                return update.payload[place] if place is not None else None
        return None


def _trimmed(updates: tuple[SparseUpdate, ...], num_bytes: int) -> tuple[SparseUpdate, ...]:
    """Remove the oldest links while the chain would be no shorter than all bytes."""
    kept, total = 0, 0
    for update in reversed(updates[-MAX_LINKS:]):
        total += update.link.num_bytes
        if total >= num_bytes:
            break
        kept += 1
    return updates[len(updates) - kept :]


# --------------------------------------------------------------------------------------------------
# The form in which a version travels to the members of a group.
#
#   all hold an older version of the chain     the sparse updates since the oldest of these
#   the version has an adapter                 the adapter; before it the base, if a member lacks it
#   otherwise, or where it is no shorter       all bytes
#
# One flat buffer in each case. Members check the digest of the version, whatever led to it.


@dataclass(frozen=True, slots=True)
class BroadcastPayload:
    """A version on its way to a group."""

    memory: mmap.mmap | bytearray
    """The bytes that travel."""
    links: tuple[SparseLink, ...] = ()
    """Updates that they are, one after the other; none = they are the version."""
    has_base: bool = False
    """The base of adapters lies before these."""


def form_for(
    slot: WeightSlot,
    ready: Collection[Ready],
    *,
    updates: Sequence[SparseUpdate] = (),
    base: mmap.mmap | None = None,
) -> BroadcastPayload:
    """Choose the form of a version for members that have answered.

    Args:
        slot: The version.
        ready: The members' answers.
        updates: The chain that leads to the version.
        base: Base weights that adapters are added to.
    """
    adapter = slot.manifest.adapter
    if adapter is not None and base is not None and adapter.num_bytes < slot.manifest.num_bytes:
        link = SparseLink(BASE, slot.manifest.version, adapter.num_bytes)
        if all(answer.base == adapter.base for answer in ready):
            return BroadcastPayload(bytearray(slot.adapter), (link,))
        return BroadcastPayload(bytearray().join((base, slot.adapter)), (link,), has_base=True)
    chain = _chain_for(slot, ready, updates)
    if chain:
        payload = bytearray().join(update.payload for update in chain)
        return BroadcastPayload(payload, tuple(update.link for update in chain))
    return BroadcastPayload(slot.memory)


def _chain_for(
    slot: WeightSlot, ready: Collection[Ready], updates: Sequence[SparseUpdate]
) -> Sequence[SparseUpdate]:
    """Return the updates since the oldest version that a member holds; empty = send all bytes."""
    bases = [update.link.base for update in updates]
    held = {answer.held for answer in ready}
    if not held or not held.issubset(bases) or updates[-1].link.version != slot.manifest.version:
        return ()
    chain = updates[min(bases.index(version) for version in held if version is not None) :]
    total = sum(update.link.num_bytes for update in chain)
    return chain if total < slot.manifest.num_bytes else ()
