"""Versions made from updates to the version here: chains of sparse updates, and adapters.

Owns the starting points of updates, whichever way these come: the newest version, and the frozen
base of adapters, which is kept beside the versions. The digest of the result decides: a starting
point that has led to a wrong digest is not used again.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence

import structlog

from broker.protocol.manifest import (
    DIGEST_BYTES,
    AdapterSpec,
    SparseLink,
    WeightManifest,
    digest_of,
)
from broker.protocol.weight_messages import CHUNK_BYTES
from broker.weights.low_rank import apply_adapter
from broker.weights.sparse import apply_changes, elements
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError

from .counters import WeightCounters
from .held import HeldWeights

log = structlog.get_logger()


class WeightUpdates:
    """Makes versions from updates, and keeps their starting points.

    Args:
        held: Has the newest version.
        counters: Counts wrong digests.
    """

    def __init__(self, held: HeldWeights, counters: WeightCounters) -> None:
        self._held = held
        self._counters = counters
        self._base: tuple[str, memoryview] | None = None
        """Digest and bytes of the base of adapters."""
        self._bad_base = ""
        """Digest of a base from which adapters led to wrong bytes."""
        self._bad_version: PolicyVersion | None = None
        """Version held here from which sparse updates led to wrong bytes."""

    @property
    def held(self) -> PolicyVersion | None:
        """Version from which sparse updates can begin, or None."""
        whole = self._held.whole
        return whole[0] if whole is not None and whole[0] != self._bad_version else None

    @property
    def base(self) -> str:
        """Digest of the base of adapters, if there is a good one; else empty."""
        digest = self._base[0] if self._base is not None else ""
        return digest if digest != self._bad_base else ""

    def chain_to(
        self, manifest: WeightManifest, links: Sequence[SparseLink]
    ) -> tuple[SparseLink, ...]:
        """Return the updates from the version here to this one; empty = take all bytes."""
        whole = self._held.whole
        if whole is None or whole[0] == self._bad_version or len(whole[1]) != manifest.num_bytes:
            return ()
        return chain_between(whole[0], manifest, links)

    def adapter_of(self, manifest: WeightManifest) -> AdapterSpec | None:
        """Return the adapter of a version if it can be used, else None.

        It must be shorter than all bytes, and its base must not have led to wrong bytes before.
        """
        adapter = manifest.adapter
        if adapter is None or adapter.num_bytes >= manifest.num_bytes:
            return None
        return adapter if adapter.base != self._bad_base else None

    async def keep_base(self, digest: str, memory: memoryview) -> bool:
        """Keep the bytes that adapters are added to. False: their digest is wrong."""
        if not await self._is_right(memory, digest):
            self._bad_base = digest
            return False
        self._base = digest, memory
        return True

    async def add_adapter(
        self, adapter: bytes | bytearray, manifest: WeightManifest, memory: mmap.mmap
    ) -> bool:
        """Fill `memory` from an adapter and the base. False: the digest is wrong."""
        assert self._base is not None
        digest, base = self._base
        try:
            await asyncio.to_thread(_merge, memory, base, adapter, manifest)
        except WeightsError as error:
            log.warning("adapter refused", reason=str(error))
            self._bad_base = digest
            return False
        if await self._is_right(memory, manifest.digest):
            return True
        self._bad_base = digest
        return False

    async def add_changes(
        self, updates: Sequence[bytes | bytearray], manifest: WeightManifest, memory: mmap.mmap
    ) -> bool:
        """Fill `memory` with a version, from updates to the version here.

        False: an update is malformed, the digest is wrong, or the version here is gone.
        """
        whole = self._held.whole
        if whole is None:  # overwritten meanwhile, in the publisher's memory
            return False
        version, base = whole
        try:
            await asyncio.to_thread(rebuild, memory, base, updates, manifest)
        except WeightsError as error:
            log.warning("sparse update refused", reason=str(error))
            self._bad_version = version
            return False
        if await self._is_right(memory, manifest.digest):
            return True
        self._bad_version = version
        return False

    async def _is_right(self, memory: mmap.mmap | memoryview, digest: str) -> bool:
        if await asyncio.to_thread(digest_of, [memory]) == digest:
            return True
        self._counters.digest_mismatches += 1
        log.warning("weights made from an update have a wrong digest")
        return False


def chain_between(
    base: PolicyVersion, manifest: WeightManifest, links: Sequence[SparseLink]
) -> tuple[SparseLink, ...]:
    """Return the links that lead from `base` to a version; empty unless shorter than all bytes."""
    bases = [link.base for link in links]
    if base not in bases or links[-1].version != manifest.version:
        return ()
    chain = tuple(links[bases.index(base) :])
    return chain if sum(link.num_bytes for link in chain) < manifest.num_bytes else ()


def digests_of_link(link: SparseLink, links: Sequence[SparseLink], digests: bytes) -> bytes:
    """Return the digests of one update's slices, out of the digests of all `links` in order."""
    before = sum(map(_num_slices, links[: links.index(link)]))
    return digests[before * DIGEST_BYTES :][: _num_slices(link) * DIGEST_BYTES]


def _num_slices(link: SparseLink) -> int:
    return -(-link.num_bytes // CHUNK_BYTES)


def _merge(
    memory: mmap.mmap, base: memoryview, adapter: bytes | bytearray, manifest: WeightManifest
) -> None:
    memory[:] = base
    apply_adapter(adapter, memory, manifest)


def rebuild(
    memory: mmap.mmap,
    base: mmap.mmap,
    updates: Sequence[bytes | bytearray],
    manifest: WeightManifest,
) -> None:
    """Fill `memory` with a version; blocks.

    Raises:
        WeightsError: An update is malformed.
    """
    target = elements(memory, manifest.tensors[0].dtype)
    target[:] = elements(base, manifest.tensors[0].dtype)
    for update in updates:
        apply_changes(update, target)
