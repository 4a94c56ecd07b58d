"""Copies of versions in the object store, written beside everything else.

Consumes the current version on offer; waits for the store. Two tasks, because updates are short and
all bytes are long:

    updates     every sparse update of the chain, or the newest adapter and once its base
    versions    all bytes of the newest version

Of the versions published meanwhile only the newest is written: actors far away skip versions rather
than fall behind. A store that fails costs them a version, and other actors nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO

import structlog
from msgspec import structs

from broker.protocol.manifest import BASE, SparseLink, WeightManifest
from broker.protocol.weight_messages import CHUNK_BYTES, Pull
from broker.weights.object_store import KEPT, WeightStore, base_name, update_name, version_name
from buffer.record.episode import PolicyVersion

from .updates.sparse_chain import SparseUpdate
from .versions_on_offer import VersionsOnOffer

log = structlog.get_logger()

READERS = ("the object store", "the object store, updates")
"""Names of the readers, so that versions stay on offer; no incarnation has spaces."""


@dataclass(frozen=True, slots=True)
class _Item:
    """An object to be written: what a pull of this version and base gives."""

    name: str
    num_bytes: int
    version: PolicyVersion
    base: PolicyVersion | None = None


class ObjectStoreWriter:
    """Writes the newest version, and updates to it, to the object store.

    Args:
        store: Destination.
        versions: Versions on offer.
    """

    def __init__(self, store: WeightStore, versions: VersionsOnOffer) -> None:
        self._store = store
        self._versions = versions
        self._urls: dict[str, str] = {}
        """Of the objects that are stored as a whole, by name."""
        self._woken = (asyncio.Event(), asyncio.Event())

    def urls_of(self, manifest: WeightManifest) -> tuple[str, str, str]:
        """Return the URLs of a version, its adapter and their base; empty = it is not stored."""
        version, digest, adapter = manifest.version, manifest.digest, manifest.adapter
        whole = self._urls.get(version_name(version, digest), "")
        if adapter is None:
            return whole, "", ""
        update = self._urls.get(update_name(version, digest, adapter.base), "")
        return whole, update, self._urls.get(base_name(adapter.base), "")

    def located(self, updates: Sequence[SparseUpdate]) -> tuple[SparseLink, ...]:
        """Return the links of these updates, with the URLs of those that are stored."""
        return tuple(
            structs.replace(update.link, store=self._urls.get(_name_of(update), ""))
            for update in updates
        )

    def wake(self) -> None:
        """Notify it that there may be a newer version."""
        for woken in self._woken:
            woken.set()

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._woken[0], self._write_version))
            tasks.create_task(self._follow(self._woken[1], self._write_updates))

    async def _follow(
        self, woken: asyncio.Event, write: Callable[[WeightManifest], Awaitable[bool]]
    ) -> None:
        while True:
            await woken.wait()
            woken.clear()
            slot = self._versions.current
            if slot is None:
                continue
            try:
                is_whole = await write(slot.manifest)
            except OSError as error:
                log.warning("weights not stored; the next version will be tried", reason=str(error))
                continue
            if not is_whole:
                woken.set()  # overtaken: there is a newer one

    async def _write_version(self, manifest: WeightManifest) -> bool:
        """Write all bytes of a version. False: it was overtaken meanwhile."""
        name = version_name(manifest.version, manifest.digest)
        item = _Item(name, manifest.num_bytes, manifest.version)
        if not await self._write(item, READERS[0]):
            return False
        self._forget(await asyncio.to_thread(self._store.forget_versions))
        return True

    async def _write_updates(self, manifest: WeightManifest) -> bool:
        """Write the updates that are not there yet. False: they were overtaken meanwhile."""
        items = self._updates_to(manifest)
        for item in items:
            if not await self._write(item, READERS[1]):
                return False
        if items:
            kept = len(items) + KEPT
            self._forget(await asyncio.to_thread(self._store.forget_updates, kept))
        return True

    def _updates_to(self, manifest: WeightManifest) -> list[_Item]:
        version, adapter = manifest.version, manifest.adapter
        if adapter is not None:
            name = update_name(version, manifest.digest, adapter.base)
            return [
                _Item(base_name(adapter.base), manifest.num_bytes, BASE),
                _Item(name, adapter.num_bytes, version, BASE),
            ]
        updates = self._versions.chain.updates if self._versions.chain is not None else ()
        links = [(_name_of(update), update.link) for update in updates]
        return [_Item(name, link.num_bytes, link.version, link.base) for name, link in links]

    async def _write(self, item: _Item, reader: str) -> bool:
        """Write an object, unless it is there. False: it was overtaken meanwhile."""
        if item.name in self._urls:
            return True
        if not await asyncio.to_thread(self._store.has, item.name, item.num_bytes):
            file = await asyncio.to_thread(self._store.create, item.name)
            try:
                is_whole = await self._copy(item, reader, file)
            finally:  # an unfinished object is never announced, and removed as it grows old
                await asyncio.to_thread(file.close)
            if not is_whole:
                return False
        self._urls[item.name] = self._store.url_of(item.name)
        return True

    async def _copy(self, item: _Item, reader: str, file: IO[bytes]) -> bool:
        for offset in range(0, item.num_bytes, CHUNK_BYTES):
            pull = Pull(item.version, offset, CHUNK_BYTES, item.base)
            payload = self._versions.read(reader, pull)
            if payload is None:
                return False
            await asyncio.to_thread(file.write, payload)
        return True

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._urls.pop(name, None)


def _name_of(update: SparseUpdate) -> str:
    return update_name(update.link.version, update.digest, update.base_digest)
