"""Writes versions to the object store, one after the other, beside everything else.

Consumes the shelf's current version; waits for the store. Whatever is published meanwhile is left
out but for the newest: actors far away skip versions rather than fall behind. A store that fails
costs them a version, and nobody else anything.
"""

from __future__ import annotations

import asyncio
from typing import IO

import structlog

from broker.protocol.manifest import WeightManifest
from broker.protocol.weight_messages import CHUNK_BYTES, Pull
from broker.weights.object_store import WeightStore
from buffer.record.episode import PolicyVersion

from .versions_on_offer import Shelf

log = structlog.get_logger()

READER = "the object store"
"""As which slices are read, so that the shelf keeps the version; no incarnation has spaces."""


class Keyframes:
    """What of this run's weights is in the object store.

    Args:
        store: Where they go.
        shelf: Where they come from.
    """

    def __init__(self, store: WeightStore, shelf: Shelf) -> None:
        self._store = store
        self._shelf = shelf
        self._stored: PolicyVersion | None = None
        self._url = ""
        self._woken = asyncio.Event()

    def url_of(self, version: PolicyVersion) -> str:
        """Return where a version is as a whole; empty = nowhere."""
        return self._url if self._stored == version else ""

    def wake(self) -> None:
        """Say that there may be a newer version."""
        self._woken.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            slot = self._shelf.current
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
        finally:  # what is unfinished is named to nobody, and forgotten as it grows old
            await asyncio.to_thread(file.close)
        if is_whole:
            await asyncio.to_thread(self._store.forget_old)
        return is_whole

    async def _copy(self, manifest: WeightManifest, file: IO[bytes]) -> bool:
        for offset in range(0, manifest.num_bytes, CHUNK_BYTES):
            payload = self._shelf.read(READER, Pull(manifest.version, offset, CHUNK_BYTES))
            if payload is None:
                return False
            await asyncio.to_thread(file.write, payload)
        return True
