"""Copies of versions in the object store, written one after the other beside everything else.

Consumes the current version on offer; waits for the store. Of the versions published meanwhile only
the newest is written: actors far away skip versions rather than fall behind. A store that fails
costs them a version, and other actors nothing.
"""

from __future__ import annotations

import asyncio
from typing import IO

import structlog

from broker.protocol.manifest import WeightManifest
from broker.protocol.weight_messages import CHUNK_BYTES, Pull
from broker.weights.object_store import WeightStore
from buffer.record.episode import PolicyVersion

from .versions_on_offer import VersionsOnOffer

log = structlog.get_logger()

READER = "the object store"
"""Reader's name, so that the version stays on offer; no incarnation has spaces."""


class ObjectStoreWriter:
    """Writes the newest version to the object store.

    Args:
        store: Destination.
        versions: Versions on offer.
    """

    def __init__(self, store: WeightStore, versions: VersionsOnOffer) -> None:
        self._store = store
        self._versions = versions
        self._stored: PolicyVersion | None = None
        self._url = ""
        self._woken = asyncio.Event()

    def url_of(self, version: PolicyVersion) -> str:
        """Return the URL of a version that is stored as a whole; empty = it is not."""
        return self._url if self._stored == version else ""

    def wake(self) -> None:
        """Notify it that there may be a newer version."""
        self._woken.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            slot = self._versions.current
            if slot is None or slot.manifest.version == self._stored:
                continue
            try:
                is_whole = await self._write(slot.manifest)
            except OSError as error:
                log.warning("weights not stored; the next version will be tried", reason=str(error))
                continue
            if is_whole:
                self._stored = slot.manifest.version
                self._url = self._store.url_of(slot.manifest)
            else:
                self._woken.set()  # overtaken: there is a newer one

    async def _write(self, manifest: WeightManifest) -> bool:
        """Write a version, unless it is there. False: it was overtaken meanwhile."""
        if await asyncio.to_thread(self._store.has, manifest):
            return True
        file = await asyncio.to_thread(self._store.create, manifest)
        try:
            is_whole = await self._copy(manifest, file)
        finally:  # an unfinished object is never announced, and removed as it grows old
            await asyncio.to_thread(file.close)
        if is_whole:
            await asyncio.to_thread(self._store.forget_old)
        return is_whole

    async def _copy(self, manifest: WeightManifest, file: IO[bytes]) -> bool:
        for offset in range(0, manifest.num_bytes, CHUNK_BYTES):
            payload = self._versions.read(READER, Pull(manifest.version, offset, CHUNK_BYTES))
            if payload is None:
                return False
            await asyncio.to_thread(file.write, payload)
        return True
