"""Pulls as a transport: an adapter, a chain of sparse updates to the version here, or all bytes.

Adapters come from the publisher; all bytes come from peers too, and sparse updates from those of a
site. The digest of the whole is checked here.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence

import structlog

from broker.protocol.manifest import BASE, AdapterSpec, SparseLink, WeightManifest, digest_of
from broker.protocol.weight_messages import (
    Announce,
    PeerEndpoint,
    Sources,
    VersionReplaced,
    WeightChunk,
)
from buffer.record.episode import PolicyVersion

from .counters import WeightCounters
from .held import HeldWeights
from .slices import SlicePull
from .sources import PullSource, WeightSources
from .staging_files import StagingFile
from .updates import WeightUpdates, digests_of_link

log = structlog.get_logger()


class WeightPull:
    """Transport of last resort: every version can be pulled from somewhere.

    Args:
        sources: Sources of slices.
        held: Offers slices to peers as they arrive.
        updates: Makes versions from updates.
        counters: Counts pulls and bytes.
        timeout_s: Time in which a pull must make progress.
    """

    def __init__(
        self,
        sources: WeightSources,
        held: HeldWeights,
        updates: WeightUpdates,
        counters: WeightCounters,
        *,
        timeout_s: float,
    ) -> None:
        self._sources = sources
        self._held = held
        self._updates = updates
        self._counters = counters
        self._timeout_s = timeout_s
        self._slices: SlicePull | None = None
        self._mismatched: PolicyVersion | None = None
        """Version that came with a wrong digest, and is pulled from the publisher alone."""
        self._only_whole: PolicyVersion | None = None
        """Version that updates did not lead to, and of which all bytes are pulled."""

    @property
    def bytes_under_way(self) -> tuple[int, int] | None:
        """Bytes that the running pull has and wants; None = no pull is running."""
        slices = self._slices
        return None if slices is None else (slices.num_bytes.total(), slices.wanted_bytes)

    def can_fetch(self, wanted: Announce | VersionReplaced) -> bool:  # noqa: ARG002 - as every transport
        """Return True: the publisher can always be asked."""
        return True

    def on_answer(self, answer: WeightChunk | VersionReplaced) -> None:
        """Process an answer of the publisher to the pull under way."""
        if self._slices is not None:
            self._slices.on_answer(answer)

    async def fetch(self, wanted: Announce | VersionReplaced, file: StagingFile) -> bool:
        """Pull a version. False: the publisher has a newer one, or the digest is wrong.

        Raises:
            DeadlineError: No source has brought anything for too long.
        """
        memory = file.memory
        self._held.keep_updates(wanted.links)
        adapter, chain = self._adapter_of(wanted), self._chain_to(wanted)
        if adapter is None and not chain:
            is_right = await self._fetch_all(wanted.manifest, wanted.sources, memory)
            self._counters.pulls += is_right
            return is_right
        is_right = False
        try:
            if adapter is not None:
                is_right = await self._fetch_adapter(wanted, adapter, memory)
            else:
                is_right = await self._fetch_changes(wanted, chain, memory)
        finally:
            if not is_right:
                self._only_whole = wanted.manifest.version
        self._counters.pulls += is_right
        self._counters.adapter_pulls += is_right and adapter is not None
        self._counters.sparse_pulls += is_right and adapter is None
        return is_right

    def _adapter_of(self, wanted: Announce | VersionReplaced) -> AdapterSpec | None:
        """Return the adapter of a version, if it can be used here, or None."""
        if wanted.manifest.version == self._only_whole:
            return None
        return self._updates.adapter_of(wanted.manifest)

    def _chain_to(self, wanted: Announce | VersionReplaced) -> tuple[SparseLink, ...]:
        """Return the updates from the version here to this one; empty = pull all bytes."""
        if wanted.manifest.version == self._only_whole:
            return ()
        return self._updates.chain_to(wanted.manifest, wanted.links)

    async def _fetch_all(
        self, manifest: WeightManifest, offered: Sources | None, memory: mmap.mmap
    ) -> bool:
        """Pull all bytes; other actors can pull each slice as it arrives."""
        version = manifest.version
        if version == self._mismatched or offered is None:
            offered = Sources((), b"")
        is_right = False
        self._held.begin_version(version, memory)
        try:
            sources = self._sources.choose_sources(offered.peers)
            if await self._pull(memory, version, sources, digests=offered.digests):
                is_right = await asyncio.to_thread(digest_of, [memory]) == manifest.digest
                if not is_right:
                    self._counters.digest_mismatches += 1
                    self._mismatched = manifest.version
                    log.warning(
                        "pulled weights have a wrong digest", pulled=tuple(manifest.version)
                    )
        finally:
            if not is_right:
                self._held.abandon()
        return is_right

    async def _fetch_adapter(
        self, wanted: Announce | VersionReplaced, adapter: AdapterSpec, memory: mmap.mmap
    ) -> bool:
        """Pull an adapter, and its base if it is not here yet."""
        manifest, sources = wanted.manifest, self._sources.choose_sources()
        if self._updates.base != adapter.base:
            base = mmap.mmap(-1, manifest.num_bytes)
            if not await self._pull(base, BASE, sources):
                return False
            if not await self._updates.keep_base(adapter.base, memoryview(base)):
                return False
        update = bytearray(adapter.num_bytes)
        if not await self._pull(update, manifest.version, sources, base=BASE):
            return False
        return await self._updates.add_adapter(update, manifest, memory)

    async def _fetch_changes(
        self, wanted: Announce | VersionReplaced, chain: Sequence[SparseLink], memory: mmap.mmap
    ) -> bool:
        """Pull a chain of sparse updates and apply it to a copy of the version that is held."""
        updates = [bytearray(link.num_bytes) for link in chain]
        for link, update in zip(chain, updates, strict=True):
            if not await self._fetch_link(wanted, link, update):
                return False
        return await self._updates.add_changes(updates, wanted.manifest, memory)

    async def _fetch_link(
        self, wanted: Announce | VersionReplaced, link: SparseLink, update: bytearray
    ) -> bool:
        """Pull one sparse update; in a site other actors can pull each slice as it arrives."""
        peers: tuple[PeerEndpoint, ...] = ()
        digests = None
        if wanted.update_digests:  # of an actor of a site
            peers = wanted.sources.peers if wanted.sources is not None else ()
            digests = digests_of_link(link, wanted.links, wanted.update_digests)
            self._held.begin_update(link, update)
        is_whole = False
        try:
            is_whole = await self._pull(
                update,
                link.version,
                self._sources.choose_sources(peers),
                base=link.base,
                digests=digests,
            )
        finally:
            if not is_whole:
                self._held.abandon()
        return is_whole

    async def _pull(
        self,
        memory: mmap.mmap | bytearray,
        version: PolicyVersion,
        sources: Sequence[PullSource],
        *,
        base: PolicyVersion | None = None,
        digests: bytes | None = None,
    ) -> bool:
        """Fill `memory` with slices. False: the publisher offers something else."""
        self._slices = slices = SlicePull(
            version,
            memory,
            sources=sources,
            base=base,
            digests=digests,
            failed=self._sources.failed,
            arrived=self._held.arrived,
            progress_timeout_s=self._timeout_s,
        )
        try:
            return await slices.run() is None
        finally:
            self._slices = None
            self._counters.peer_bytes += slices.num_bytes["peers"]
            self._counters.pulled_bytes += slices.num_bytes.total()
