"""A publisher whose answers a test scripts, and a transfer that pulls from it."""

import asyncio

import numpy as np

from actors.weights.links import ActorIdentity
from actors.weights.sources import WeightSources
from actors.weights.staging_files import StagingFile, StagingFiles
from actors.weights.transfer import WeightTransfer
from broker.protocol.manifest import Probe, TensorSpec, WeightManifest, checksum_of, digest_of
from broker.protocol.weight_messages import Pull, VersionReplaced, WeightChunk, WeightGroupFault
from broker.transport.keys import KeyPair
from buffer.record.episode import PolicyVersion

CHUNK_BYTES = 1024  # small, so that many fit into a test
NUM_BYTES = 6 * CHUNK_BYTES + 4


def contents(step: int) -> bytes:
    """Weights of a version: every sixteenth differs from those of other versions."""
    weights = np.arange(NUM_BYTES // 2, dtype="<u2")
    weights[::16] = 40_000 + step
    return weights.tobytes()


def manifest(step: int, lineage: int = 1) -> WeightManifest:
    return WeightManifest(
        version=PolicyVersion(lineage, step),
        digest=digest_of([contents(step)]),
        checksum=checksum_of(contents(step)),
        num_bytes=NUM_BYTES,
        tensors=(TensorSpec("w", "bfloat16", (NUM_BYTES // 2,), 0, NUM_BYTES),),
        probe=Probe((1, 2), (-0.5,)),
    )


class ScriptedPublisher:
    """Answers a pull at once, except as `lose` and `spoil` say; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[Pull] = []
        self.faults: list[WeightGroupFault] = []
        self.outstanding = self.most_outstanding = 0
        self.lose: set[int] = set()
        self.spoil = 0
        self.delay_s = 0.001
        self.newer: WeightManifest | None = None
        self.updates: dict[tuple[int, int], bytes] = {}
        self.answer = lambda message: None

    def post(self, message) -> bool:
        if isinstance(message, WeightGroupFault):
            self.faults.append(message)
        if not isinstance(message, Pull):
            return True
        self.asked.append(message)
        if message.offset in self.lose:
            self.lose.discard(message.offset)
            return False
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        asyncio.get_running_loop().call_later(self.delay_s, self._reply, message)
        return True

    def _reply(self, pull: Pull) -> None:
        self.outstanding -= 1
        if self.newer is not None and self.newer.version > pull.version:
            self.answer(VersionReplaced(self.newer, pull.offset))
            return
        whole = contents(pull.version.step)
        if pull.base is not None:
            whole = self.updates.get((pull.base.step, pull.version.step), b"")
            if not whole:
                self.answer(VersionReplaced(manifest(pull.version.step), pull.offset))
                return
        payload = bytearray(whole[pull.offset : pull.offset + pull.num_bytes])
        if self.spoil:
            self.spoil -= 1
            payload[0] ^= 1
        self.answer(WeightChunk(pull.version, pull.offset, bytes(payload), pull.base))


CALLER = ActorIdentity(KeyPair(b"", b""), "toy", "a")


def only(publisher, *first) -> WeightSources:
    return WeightSources(publisher.post, order=(*first, "publisher"), caller=CALLER)


class Stage:
    """A transfer whose staged versions can be waited for."""

    def __init__(self, publisher, folder, *, timeout_s: float = 5.0) -> None:
        self.files = StagingFiles("test", fallback=folder)
        self.staged: list[WeightManifest] = []
        self.bytes: list[bytes] = []
        self.kept: list[StagingFile] = []
        self.keeps = False
        self.arrived = asyncio.Event()
        self.transfer = WeightTransfer(
            self.files,
            post=publisher.post,
            sources=only(publisher, "memory"),
            stage=self._stage,
            timeout_s=timeout_s,
        )
        publisher.answer = self.transfer.on_message

    def _stage(self, manifest, file) -> None:
        self.staged.append(manifest)
        self.bytes.append(file.memory[:])
        self.kept.append(file)
        if not self.keeps:
            self.files.release(file)
        self.arrived.set()

    async def play(self, story) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(self.transfer.run())
                await asyncio.sleep(0)
                await asyncio.wait_for(story(self), 10.0)
                running.cancel()
        finally:
            self.files.close()


def play(publisher, folder, story, **options) -> Stage:
    async def whole() -> Stage:
        stage = Stage(publisher, folder, **options)
        await stage.play(story)
        return stage

    return asyncio.run(whole())
