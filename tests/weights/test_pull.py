"""Pulls and transfers against a scripted publisher: lost, repeated, wrong and corrupt slices."""

import asyncio
import mmap

import pytest

from actors import weight_pull
from actors.staging_files import StagingFiles
from actors.weight_pull import WeightPull
from actors.weight_transfer import MAX_MISMATCHES, WeightTransfer
from broker.manifest import Probe, TensorSpec, WeightManifest, digest_of
from broker.weights import PULL_CREDIT, Announce, Chunk, Fault, Moved, Pull
from buffer.episode import PolicyVersion
from configs.errors import DeadlineError, WeightsError

CHUNK_BYTES = 1024  # small, so that many fit into a test
NUM_BYTES = 6 * CHUNK_BYTES + 3


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(weight_pull, "CHUNK_BYTES", CHUNK_BYTES)


def contents(step: int) -> bytes:
    return bytes([step]) * NUM_BYTES


def manifest(step: int, lineage: int = 1) -> WeightManifest:
    return WeightManifest(
        version=PolicyVersion(lineage, step),
        digest=digest_of([contents(step)]),
        num_bytes=NUM_BYTES,
        tensors=(TensorSpec("w", "bfloat16", (NUM_BYTES // 2,), 0, NUM_BYTES),),
        probe=Probe((1, 2), (-0.5,)),
    )


class ScriptedPublisher:
    """Answers a pull at once, except as `lose` and `spoil` say; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[Pull] = []
        self.faults: list[Fault] = []
        self.outstanding = self.most_outstanding = 0
        self.lose: set[int] = set()
        self.spoil = 0
        self.newer: WeightManifest | None = None
        self.answer = lambda message: None

    def post(self, message) -> bool:
        if isinstance(message, Fault):
            self.faults.append(message)
        if not isinstance(message, Pull):
            return True
        self.asked.append(message)
        if message.offset in self.lose:
            self.lose.discard(message.offset)
            return False
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        asyncio.get_running_loop().call_later(0.001, self._reply, message)
        return True

    def _reply(self, pull: Pull) -> None:
        self.outstanding -= 1
        if self.newer is not None and self.newer.version > pull.version:
            self.answer(Moved(self.newer, pull.offset))
            return
        payload = bytearray(contents(pull.version.step)[pull.offset : pull.offset + pull.num_bytes])
        if self.spoil:
            self.spoil -= 1
            payload[0] ^= 1
        self.answer(Chunk(pull.version, pull.offset, bytes(payload)))


@pytest.fixture
def publisher():
    return ScriptedPublisher()


@pytest.fixture
def memory():
    return mmap.mmap(-1, NUM_BYTES)


async def pulled(publisher, memory, step=1, timeout_s=5.0):
    pull = WeightPull(manifest(step), memory, post=publisher.post, progress_timeout_s=timeout_s)
    publisher.answer = pull.take
    return await pull.run()


def test_a_pull_fills_the_memory_within_its_credit(publisher, memory):
    assert asyncio.run(pulled(publisher, memory)) is None

    assert memory[:] == contents(1)
    assert len(publisher.asked) == 7
    assert publisher.most_outstanding == PULL_CREDIT


def test_a_lost_request_is_repeated(publisher, memory, monkeypatch):
    monkeypatch.setattr(weight_pull, "FIRST_PATIENCE_S", 0.05)
    publisher.lose = {0, 2 * CHUNK_BYTES}

    assert asyncio.run(pulled(publisher, memory)) is None

    assert memory[:] == contents(1)


def test_a_pull_ends_when_nothing_comes(publisher, memory, monkeypatch):
    monkeypatch.setattr(weight_pull, "FIRST_PATIENCE_S", 0.02)
    publisher.post = lambda message: False

    with pytest.raises(DeadlineError, match=r"must make progress within 0\.1 s, got nothing of"):
        asyncio.run(pulled(publisher, memory, timeout_s=0.1))


def test_a_version_that_is_gone_is_answered_by_a_newer_one(publisher, memory):
    publisher.newer = manifest(2)

    assert asyncio.run(pulled(publisher, memory)) == manifest(2)


def test_slices_that_were_not_asked_for_are_not_written(publisher, memory):
    async def story():
        pull = WeightPull(manifest(1), memory, post=publisher.post, progress_timeout_s=5.0)
        publisher.answer = pull.take
        pull.take(Chunk(PolicyVersion(1, 0), 0, b"x" * CHUNK_BYTES))  # another version
        pull.take(Chunk(PolicyVersion(1, 1), 1, b"x" * CHUNK_BYTES))  # another place
        pull.take(Chunk(PolicyVersion(1, 1), 0, b"x"))  # another length
        await pull.run()

    asyncio.run(story())

    assert memory[:] == contents(1)


class Stage:
    """A transfer whose staged versions can be waited for."""

    def __init__(self, publisher, folder) -> None:
        self.files = StagingFiles("test", fallback=folder)
        self.staged: list[WeightManifest] = []
        self.bytes: list[bytes] = []
        self.arrived = asyncio.Event()
        self.transfer = WeightTransfer(
            self.files, post=publisher.post, stage=self._take, timeout_s=5.0
        )
        publisher.answer = self.transfer.take

    def _take(self, manifest, file) -> None:
        self.staged.append(manifest)
        self.bytes.append(file.memory[:16])
        self.files.give_back(file)
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


def play(publisher, folder, story) -> Stage:
    async def whole() -> Stage:
        stage = Stage(publisher, folder)
        await stage.play(story)
        return stage

    return asyncio.run(whole())


def test_corrupt_bytes_are_never_staged_but_pulled_again(publisher, tmp_path):
    publisher.spoil = 1

    async def story(stage):
        stage.transfer.take(Announce(manifest(1), 0))
        await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert stage.bytes == [bytes([1]) * 16]
    assert stage.transfer.counters.digest_mismatches == 1


def test_bytes_that_stay_corrupt_end_the_actor(publisher, tmp_path):
    publisher.spoil = 10**6

    async def story(stage):
        stage.transfer.take(Announce(manifest(1), 0))
        await stage.arrived.wait()

    with pytest.raises(ExceptionGroup) as raised:
        play(publisher, tmp_path, story)
    assert raised.group_contains(
        WeightsError,
        match=rf"digest of weights \(1, 1\) must be .* another one {MAX_MISMATCHES} times",
    )


def test_the_newest_of_several_announcements_is_what_counts(publisher, tmp_path):
    async def story(stage):
        stage.transfer.take(Announce(manifest(1), 0))
        await asyncio.sleep(0)  # the first pull has begun
        await asyncio.sleep(0)
        assert publisher.asked
        stage.transfer.take(Announce(manifest(2), 0))
        stage.transfer.take(Announce(manifest(3), 0))
        while stage.transfer.held != (1, 3):
            stage.arrived.clear()
            await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert [m.version.step for m in stage.staged] == [1, 3]


def test_older_versions_and_lower_lineages_are_refused(publisher, tmp_path):
    async def story(stage):
        stage.transfer.take(Announce(manifest(5, lineage=2), 0))
        await stage.arrived.wait()
        asked = len(publisher.asked)
        for refused in (manifest(5, lineage=2), manifest(4, lineage=2), manifest(9, lineage=1)):
            stage.transfer.take(Announce(refused, 0))
            stage.transfer.take(Announce(refused, 7))
        await asyncio.sleep(0.05)
        assert len(publisher.asked) == asked
        assert stage.transfer.counters.pulls == 1

    stage = play(publisher, tmp_path, story)

    assert [m.version for m in stage.staged] == [(2, 5)]
    assert not publisher.faults  # nor was it waiting for one of these epochs


def test_an_announced_epoch_that_never_comes_ends_in_a_pull(publisher, tmp_path):
    async def story(stage):
        stage.transfer._timeout_s = 0.1
        stage.transfer.take(Announce(manifest(1), 7))
        await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert stage.transfer.counters.pulls == 1
    assert "no success within 0.1 s" in publisher.faults[0].reason
