"""Versions on offer in slots of their own."""

import time
from pathlib import Path

from broker.protocol.manifest import (
    AdapterSpec,
    Probe,
    TensorSpec,
    WeightManifest,
    checksum_of,
    digest_of,
)
from broker.protocol.weight_messages import CHUNK_BYTES
from buffer.record.episode import PolicyVersion
from learner.weights.memory import WeightSlots
from learner.weights.pull import VersionsOnOffer
from learner.weights.updates import SparseChain

NUM_BYTES = CHUNK_BYTES + 1000  # two slices


def here_and_there(step: int) -> bytes:
    """Weights of which one in 500 differs from that of the version before."""
    whole = bytearray(NUM_BYTES)
    for changed in range(1, step + 1):
        whole[2 * changed :: 1000] = bytes([changed]) * len(whole[2 * changed :: 1000])
    return bytes(whole)


class Published:
    """Versions on offer."""

    def __init__(
        self,
        folder: Path,
        *,
        chain: SparseChain | None = None,
        base: bytes | None = None,
    ) -> None:
        self.slots = WeightSlots(folder)
        for index in range(3):
            self.slots.path(index).write_bytes(bytes(NUM_BYTES))
            self.slots.add(index)
        self.base = base
        if base is not None:
            self.slots.base_path.write_bytes(base)
        self.versions = VersionsOnOffer(self.slots, chain, clock=time.monotonic)

    def manifest(self, step: int, adapter: bytes = b"") -> WeightManifest:
        contents = here_and_there(step)
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
        self.slots.path(index).write_bytes(here_and_there(step))
        self.slots.seal(index, self.manifest(step, adapter), adapter)
        slot = self.versions.advance()
        if self.versions.chain is not None and slot is not None:
            self.versions.chain.advance(slot)
