"""Versions made of an older one and sparse updates: which updates, and their application."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from broker.protocol.manifest import SparseLink, WeightManifest
from broker.weights.sparse import apply_changes, elements
from buffer.record.episode import PolicyVersion


def chain_between(
    base: PolicyVersion, manifest: WeightManifest, links: Sequence[SparseLink]
) -> tuple[SparseLink, ...]:
    """Return the links that lead from `base` to a version; none: all its bytes are no longer."""
    bases = [link.base for link in links]
    if base not in bases or links[-1].version != manifest.version:
        return ()
    chain = tuple(links[bases.index(base) :])
    return chain if sum(link.num_bytes for link in chain) < manifest.num_bytes else ()


def rebuild(
    memory: mmap.mmap, base: mmap.mmap, updates: Sequence[bytearray], manifest: WeightManifest
) -> None:
    """Fill `memory` with a version; blocks.

    Raises:
        WeightsError: an update is malformed.
    """
    target = elements(memory, manifest.tensors[0].dtype)
    target[:] = elements(base, manifest.tensors[0].dtype)
    for update in updates:
        apply_changes(update, target)
