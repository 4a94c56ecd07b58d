"""The form in which a version travels to the members of a group.

    all hold an older version of the chain     the sparse updates since the oldest of these
    the version has an adapter                 the adapter; before it the base, if a member lacks it
    otherwise, or where it is no shorter       all bytes

One flat buffer in each case. Members check the digest of the version, whatever led to it.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from broker.protocol.manifest import BASE, SparseLink
from broker.protocol.weight_messages import Ready
from learner.weights.slots import Slot

from .sparse_chain import SparseUpdate


@dataclass(frozen=True, slots=True)
class Form:
    """A version on its way to a group."""

    memory: mmap.mmap | bytearray
    """The bytes that travel."""
    links: tuple[SparseLink, ...] = ()
    """Updates that they are, one after the other; none = they are the version."""
    has_base: bool = False
    """The base of adapters lies before these."""


def form_for(
    slot: Slot,
    ready: Collection[Ready],
    *,
    updates: Sequence[SparseUpdate] = (),
    base: mmap.mmap | None = None,
) -> Form:
    """Choose the form of a version for members that have answered.

    Args:
        slot: The version.
        ready: The members' answers.
        updates: The chain that leads to the version.
        base: What adapters are added to.
    """
    adapter = slot.manifest.adapter
    if adapter is not None and base is not None and adapter.num_bytes < slot.manifest.num_bytes:
        link = SparseLink(BASE, slot.manifest.version, adapter.num_bytes)
        if all(answer.base == adapter.base for answer in ready):
            return Form(bytearray(slot.adapter), (link,))
        return Form(bytearray().join((base, slot.adapter)), (link,), has_base=True)
    chain = _chain_for(slot, ready, updates)
    if chain:
        payload = bytearray().join(update.payload for update in chain)
        return Form(payload, tuple(update.link for update in chain))
    return Form(slot.memory)


def _chain_for(
    slot: Slot, ready: Collection[Ready], updates: Sequence[SparseUpdate]
) -> Sequence[SparseUpdate]:
    """Return the updates since the oldest version that a member holds; none = all bytes."""
    bases = [update.link.base for update in updates]
    held = {answer.held for answer in ready}
    if not held or not held.issubset(bases) or updates[-1].link.version != slot.manifest.version:
        return ()
    chain = updates[min(bases.index(version) for version in held if version is not None) :]
    total = sum(update.link.num_bytes for update in chain)
    return chain if total < slot.manifest.num_bytes else ()
