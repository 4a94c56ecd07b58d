"""Pulls as a transport: an adapter, a chain of sparse updates from what is held, or all bytes.

Adapters and sparse updates come from the publisher alone; all bytes come from peers and the object
store too. The digest of the whole is checked here.

The base of adapters is pulled once, and stays in memory beside the versions.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence

import structlog

from broker.protocol.manifest import BASE, AdapterSpec, SparseLink, WeightManifest, digest_of
from broker.protocol.weight_messages import Announce, Chunk, Moved, Sources
from broker.weights.low_rank import apply_adapter
from broker.weights.sparse import apply_changes, elements
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError

from .counters import WeightCounters
from .held import HeldWeights
from .slices import SlicePull
from .sources import WeightSources

log = structlog.get_logger()


class WeightPull:
    """Transport of last resort: every version can be pulled from somewhere.

    Args:
        sources: Sources of slices.
        held: Holds the base of sparse updates; is given slices as they arrive.
        counters: Counts pulls and bytes.
        timeout_s: Time in which a pull must make progress.
    """

    def __init__(
        self,
        sources: WeightSources,
        held: HeldWeights,
        counters: WeightCounters,
        *,
        timeout_s: float,
    ) -> None:
        self._sources = sources
        self._held = held
        self._counters = counters
        self._timeout_s = timeout_s
        self._slices: SlicePull | None = None
        self._mismatched: PolicyVersion | None = None
        """Version that came with a wrong digest; all its bytes are then the publisher's."""
        self._base: tuple[str, mmap.mmap] | None = None
        """Digest and bytes of what adapters are added to."""
        self._bad_adapters = ""
        """Digest of a base from which adapters led to wrong bytes: they are not tried again."""
        self._bad_base: PolicyVersion | None = None
        """Version held here from which a chain of updates led to wrong bytes."""

    def can_fetch(self, wanted: Announce | Moved) -> bool:  # noqa: ARG002 - as every transport
        """Return True."""
        return True

    def on_answer(self, answer: Chunk | Moved) -> None:
        """Process an answer of the publisher to the pull under way."""
        if self._slices is not None:
            self._slices.on_answer(answer)

    async def fetch(self, wanted: Announce | Moved, memory: mmap.mmap) -> bool:
        """Pull a version. False: the publisher has a newer one, or the digest is wrong.

        Raises:
            DeadlineError: No source has brought anything for too long.
        """
        manifest = wanted.manifest
        is_retry = manifest.version == self._mismatched
        chain = () if is_retry else self._chain_to(wanted)
        adapter = None if is_retry else self._adapter_of(manifest)
        if adapter is not None:
            is_right = await self._fetch_adapter(manifest, adapter, memory)
        elif chain:
            is_right = await self._fetch_changes(manifest, chain, memory)
        else:
            is_right = await self._fetch_all(manifest, None if is_retry else wanted.sources, memory)
        if is_right:
            self._counters.pulls += 1
            self._counters.adapter_pulls += adapter is not None
            self._counters.sparse_pulls += bool(chain)
        return is_right

    def _adapter_of(self, manifest: WeightManifest) -> AdapterSpec | None:
        """Return the adapter of a version, if it may come here and is shorter than all bytes."""
        adapter = manifest.adapter
        if adapter is None or not self._sources.has_publisher:
            return None
        is_shorter = adapter.num_bytes < manifest.num_bytes
        return adapter if is_shorter and adapter.base != self._bad_adapters else None

    def _chain_to(self, wanted: Announce | Moved) -> tuple[SparseLink, ...]:
        """Return the updates that lead from what is held to this version; none = take all bytes."""
        if self._held.whole is None or not self._sources.has_publisher:  # it alone has updates
            return ()
        version, memory = self._held.whole
        if version == self._bad_base or len(memory) != wanted.manifest.num_bytes:
            return ()
        return chain_between(version, wanted.manifest, wanted.links)

    async def _fetch_all(
        self, manifest: WeightManifest, offered: Sources | None, memory: mmap.mmap
    ) -> bool:
        """Pull all bytes; other actors can have each slice as it arrives."""
        is_right = False
        self._held.begin(manifest.version, memory)
        try:
            if await self._pull(memory, manifest.version, offered=offered):
                is_right = await self._is_right(memory, manifest)
        finally:
            if not is_right:
                self._held.abandon()
        return is_right

    async def _fetch_adapter(
        self, manifest: WeightManifest, adapter: AdapterSpec, memory: mmap.mmap
    ) -> bool:
        """Pull an adapter and add it to a copy of the base. False: all bytes are next."""
        base = await self._pull_base(manifest, adapter)
        update = bytearray(adapter.num_bytes)
        if base is None or not await self._pull(update, manifest.version, base=BASE):
            self._mismatched = manifest.version
            return False
        try:
            await asyncio.to_thread(_merge, memory, base, update, manifest)
        except WeightsError as error:
            log.warning("adapter refused", reason=str(error))
            self._mismatched, self._bad_adapters = manifest.version, adapter.base
            return False
        if not await self._is_right(memory, manifest):
            self._bad_adapters = adapter.base
            return False
        return True

    async def _pull_base(self, manifest: WeightManifest, adapter: AdapterSpec) -> mmap.mmap | None:
        """Return what an adapter is added to, pulled once; None if it cannot be had."""
        if self._base is None or self._base[0] != adapter.base:
            memory = mmap.mmap(-1, manifest.num_bytes)
            if not await self._pull(memory, BASE):
                return None
            if not await self._is_right(memory, manifest, digest=adapter.base):
                self._bad_adapters = adapter.base
                return None
            self._base = adapter.base, memory
        return self._base[1]

    async def _fetch_changes(
        self,
        manifest: WeightManifest,
        chain: Sequence[SparseLink],
        memory: mmap.mmap,
    ) -> bool:
        """Pull a chain of sparse updates and apply it to a copy of what is held."""
        assert self._held.whole is not None
        held, base = self._held.whole
        updates = [bytearray(link.num_bytes) for link in chain]
        for link, update in zip(chain, updates, strict=True):
            if not await self._pull(update, link.version, base=link.base):
                return False
        try:
            await asyncio.to_thread(rebuild, memory, base, updates, manifest)
        except WeightsError as error:
            log.warning("sparse update refused", reason=str(error))
            self._mismatched, self._bad_base = manifest.version, held
            return False
        if not await self._is_right(memory, manifest):
            self._bad_base = held
            return False
        return True

    async def _is_right(
        self, memory: mmap.mmap, manifest: WeightManifest, *, digest: str | None = None
    ) -> bool:
        if await asyncio.to_thread(digest_of, [memory]) == (digest or manifest.digest):
            return True
        self._counters.digest_mismatches += 1
        self._mismatched = manifest.version
        log.warning("pulled weights have a wrong digest", pulled=tuple(manifest.version))
        return False

    async def _pull(
        self,
        memory: mmap.mmap | bytearray,
        version: PolicyVersion,
        *,
        base: PolicyVersion | None = None,
        offered: Sources | None = None,
    ) -> bool:
        """Fill `memory` with slices. False: the publisher offers something else."""
        self._slices = slices = SlicePull(
            version,
            memory,
            sources=self._sources.of(offered),
            base=base,
            digests=offered.digests if offered is not None else b"",
            failed=self._sources.failed,
            arrived=self._held.arrived,
            progress_timeout_s=self._timeout_s,
        )
        try:
            return await slices.run() is None
        finally:
            self._slices = None
            self._counters.peer_bytes += slices.num_bytes["peers"]
            self._counters.store_bytes += slices.num_bytes["store"]
            self._counters.pulled_bytes += slices.num_bytes.total()


def chain_between(
    base: PolicyVersion, manifest: WeightManifest, links: Sequence[SparseLink]
) -> tuple[SparseLink, ...]:
    """Return the links that lead from `base` to a version; none if all its bytes are no longer."""
    bases = [link.base for link in links]
    if base not in bases or links[-1].version != manifest.version:
        return ()
    chain = tuple(links[bases.index(base) :])
    return chain if sum(link.num_bytes for link in chain) < manifest.num_bytes else ()


def _merge(memory: mmap.mmap, base: mmap.mmap, update: bytearray, manifest: WeightManifest) -> None:
    """Fill `memory` with a version; blocks."""
    memory[:] = base[:]
    apply_adapter(update, memory, manifest)


def rebuild(
    memory: mmap.mmap, base: mmap.mmap, updates: Sequence[bytearray], manifest: WeightManifest
) -> None:
    """Fill `memory` with a version; blocks.

    Raises:
        WeightsError: An update is malformed.
    """
    target = elements(memory, manifest.tensors[0].dtype)
    target[:] = elements(base, manifest.tensors[0].dtype)
    for update in updates:
        apply_changes(update, target)
