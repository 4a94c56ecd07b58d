"""Versions on offer in slots of their own, and their writer to a store in memory."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from broker.protocol.manifest import (
    AdapterSpec,
    Probe,
    TensorSpec,
    WeightManifest,
    checksum_of,
    digest_of,
)
from broker.protocol.weight_messages import CHUNK_BYTES
from broker.weights.object_store import WeightStore
from buffer.record.episode import PolicyVersion
from learner.weights.object_store_writer import ObjectStoreWriter
from learner.weights.slots import Slots
from learner.weights.updates.sparse_chain import SparseChain
from learner.weights.versions_on_offer import VersionsOnOffer
from tests.waiting import until

Found = TypeVar("Found")
NUM_BYTES = CHUNK_BYTES + 1000  # two slices


def all_over(step: int) -> bytes:
    """Weights that all differ from those of any other version."""
    return bytes([step]) * NUM_BYTES


def here_and_there(step: int) -> bytes:
    """Weights of which one in 500 differs from that of the version before."""
    whole = bytearray(NUM_BYTES)
    for changed in range(1, step + 1):
        whole[2 * changed :: 1000] = bytes([changed]) * len(whole[2 * changed :: 1000])
    return bytes(whole)


class Published:
    """Versions on offer, and their writer."""

    def __init__(
        self,
        folder: Path,
        *,
        contents: Callable[[int], bytes] = all_over,
        chain: SparseChain | None = None,
        base: bytes | None = None,
    ) -> None:
        self.contents = contents
        self.slots = Slots(folder)
        for index in range(3):
            self.slots.path(index).write_bytes(bytes(NUM_BYTES))
            self.slots.add(index)
        self.base = base
        if base is not None:
            self.slots.base_path.write_bytes(base)
        self.versions = VersionsOnOffer(self.slots, chain, clock=time.monotonic)
        self.store = WeightStore(f"memory://{folder}", "toy")
        self.writer = ObjectStoreWriter(self.store, self.versions)

    def manifest(self, step: int, adapter: bytes = b"") -> WeightManifest:
        contents = self.contents(step)
        spec = None
        if self.base is not None:
            spec = AdapterSpec(digest_of([self.base]), 1, 1.0, len(adapter), (0,))
        return WeightManifest(
            PolicyVersion(1, step),
            digest_of([contents]),
            checksum_of(contents),
            NUM_BYTES,
            (TensorSpec("w", "bfloat16", (NUM_BYTES // 2,), 0, NUM_BYTES),),
            Probe((1, 2), (-0.5,)),
            spec,
        )

    def publish(self, step: int, adapter: bytes = b"") -> None:
        index = self.slots.acquire()
        self.slots.path(index).write_bytes(self.contents(step))
        self.slots.seal(index, self.manifest(step, adapter), adapter)
        slot = self.versions.advance()
        if self.versions.chain is not None and slot is not None:
            self.versions.chain.advance(slot)
        self.writer.wake()

    def url_of(self, step: int) -> str:
        return self.writer.urls_of(self.manifest(step))[0]

    async def stored(self, step: int) -> str:
        """Wait until a version is named; returns where it is."""
        return await until(lambda: self.url_of(step))

    def objects(self) -> list[str]:
        """Names of all objects, without the folder."""
        found: list[str] = self.store._files.find(self.store._root)
        return sorted(path.rpartition("/")[2] for path in found)


def play(published: Callable[[], Published], story):
    """Run a story beside the writer."""

    async def whole():
        made = published()
        running = asyncio.create_task(made.writer.run())
        found = await story(made)
        assert not running.done()
        running.cancel()
        return found

    return asyncio.run(whole())


def refusing(patch: pytest.MonkeyPatch) -> list[str]:
    """Let the store take nothing any more; returns what it refuses."""
    refused: list[str] = []

    def create(_store: WeightStore, name: str) -> None:
        refused.append(name)
        raise PermissionError("no such bucket")

    patch.setattr(WeightStore, "create", create)
    return refused
