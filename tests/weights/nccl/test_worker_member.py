"""The member in vLLM's worker, steered over the line to its actor: here both are in one process.

With the fake NCCL, whose collectives an abort ends as NCCL's. Real workers of a real vLLM, in
processes of their own, are in `tests/weights/vllm/`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import structs

from actors.engine.weights.worker_member import serve_actor
from actors.weights.counters import WeightCounters
from actors.weights.group import GroupMember
from actors.weights.held import HeldWeights
from actors.weights.staging_files import StagingFile, StagingFiles
from actors.weights.updates import WeightUpdates
from actors.weights.worker_line import WorkerLine
from broker.protocol.manifest import Probe, WeightManifest, digest_of
from broker.protocol.weight_messages import Announce, Epoch, Ready, WeightGroupFault
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError
from configs.worker import Worker
from learner.weights.group import GroupPlan, SendingGroup, listen
from tests.waiting import until
from tests.weights.support.fake_nccl import FakeNccl, fake_nccl

BYTES = os.urandom(100_003)
BUCKET = 20_000
LONG_S = 120.0
"""A deadline that no test waits for."""
SOON_S = 20.0


@pytest.fixture(autouse=True)
def members() -> Iterator[list[FakeNccl]]:
    with fake_nccl() as made:
        yield made


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[WorkerLine, Worker]]:
    """A line whose worker has connected."""
    line = WorkerLine()
    running = asyncio.create_task(line.run())
    worker = serve_actor(line.path, "cpu")
    await until(lambda: line.is_open, every_s=0.001)
    try:
        yield line, worker
    finally:
        running.cancel()
        await asyncio.wait([running])
        await asyncio.to_thread(worker.join, SOON_S)


def members_now() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "weights-1"}


class Sender:
    """Rank 0 of a group of two, and the invitation to it."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1")
        self.epoch = Epoch(
            number=1,
            version=PolicyVersion(1, 1),
            fresh=True,
            backend="nccl",
            host="127.0.0.1",
            port=listener.getsockname()[1],
            rank=1,
            size=2,
            bucket_bytes=BUCKET,
            join_s=SOON_S,
            send_s=LONG_S,
        )
        self.group = SendingGroup(GroupPlan("nccl", "127.0.0.1", 2, SOON_S), listener)

    def send(self, contents: bytes) -> None:
        memory = mmap.mmap(-1, len(contents))
        memory[:] = contents
        self.group.send(memory, bucket_bytes=BUCKET, send_s=SOON_S)


def staged(folder: Path, num_bytes: int = len(BYTES)) -> tuple[Path, mmap.mmap]:
    path = folder / "staged"
    path.write_bytes(bytes(num_bytes))
    with path.open("r+b") as file:
        return path, mmap.mmap(file.fileno(), 0)


def test_a_version_arrives_in_the_file_that_the_worker_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        sender, (path, memory) = Sender(), staged(tmp_path)
        async with connected() as (line, _):
            await line.enter(sender.epoch)
            sending = asyncio.create_task(asyncio.to_thread(sender.send, BYTES))
            digest = await line.receive(path, memory)
            await sending
            assert digest == digest_of([BYTES])
            assert memory[:] == BYTES

            await line.enter(structs.replace(sender.epoch, fresh=False))
            sending = asyncio.create_task(asyncio.to_thread(sender.send, BYTES[::-1]))
            assert await line.receive(path, memory) == digest_of([BYTES[::-1]])
            await sending
        sender.group.close()

    asyncio.run(story())


async def mid_broadcast(line: WorkerLine, folder: Path) -> asyncio.Task[str]:
    """A receive of which the first of two halves comes, and then nothing."""
    sender, (path, memory) = Sender(), staged(folder, 10 * BUCKET)
    await line.enter(sender.epoch)
    receiving = asyncio.create_task(line.receive(path, memory))
    await asyncio.to_thread(sender.send, BYTES[: 5 * BUCKET])
    await until(lambda: memory[:BUCKET] == BYTES[:BUCKET], every_s=0.001)
    assert not receiving.done()
    return receiving


def test_to_leave_aborts_what_is_under_way_long_before_its_deadline(
    tmp_path: Path, members: list[FakeNccl]
) -> None:
    async def story() -> None:
        async with connected() as (line, _):
            receiving = await mid_broadcast(line, tmp_path)
            line.leave_group()
            async with asyncio.timeout(SOON_S):
                with pytest.raises(WeightsError, match="the broadcast failed: aborted"):
                    await receiving
            assert [member.is_aborted for member in members] == [False, True]

    asyncio.run(story())


def test_an_actor_that_ends_ends_the_membership_of_its_worker(tmp_path: Path) -> None:
    earlier = members_now()  # of other tests: a thread of a group ends when its last call does

    async def story() -> None:
        async with connected() as (line, worker):
            receiving = await mid_broadcast(line, tmp_path)
            assert members_now() - earlier
        assert not worker.is_alive
        with pytest.raises(WeightsError, match="worker cannot receive: this actor ends"):
            await receiving
        await until(lambda: not members_now() - earlier, every_s=0.001)

    asyncio.run(story())


def test_without_its_worker_an_actor_joins_no_group(tmp_path: Path) -> None:
    async def story() -> None:
        path, memory = staged(tmp_path)
        async with connected() as (line, worker):
            with pytest.raises(WeightsError, match="SEND must follow EPOCH"):
                await line.receive(path, memory)
            with pytest.raises(WeightsError, match="weight group 1 must be new or entered already"):
                await line.enter(structs.replace(Sender().epoch, fresh=False))
            assert worker.is_alive
        assert not line.is_open
        with pytest.raises(WeightsError, match="worker must be there to join a weight group"):
            await line.enter(Sender().epoch)

    asyncio.run(story())


@pytest.mark.parametrize("is_stopped", [False, True], ids=["there", "stopped"])
def test_an_actor_is_ready_when_its_worker_is(tmp_path: Path, is_stopped: bool) -> None:
    """A worker that stands still must be found before the others are in a broadcast with it."""
    epoch = Sender().epoch
    manifest = WeightManifest(epoch.version, "", "", len(BYTES), (), Probe((), ()))
    posted: list[object] = []

    def post(message: object) -> bool:
        posted.append(message)
        return True

    async def story() -> None:
        line = WorkerLine()
        running = asyncio.create_task(line.run())
        with socket.socket(socket.AF_UNIX) as silent:
            if is_stopped:
                silent.connect(line.path)
            else:
                serve_actor(line.path, "cpu")
            await until(lambda: line.is_open, every_s=0.001)
            updates = WeightUpdates(HeldWeights(), counters := WeightCounters())
            files = StagingFiles("test", fallback=tmp_path)
            member = GroupMember(post, updates, files, counters, place=line, timeout_s=0.5)
            member.expect(epoch.version)
            member.on_message(epoch)
            file = StagingFile(*staged(tmp_path))
            assert not await member.fetch(Announce(manifest, epoch.number), file)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())
    kinds = [type(message) for message in posted]
    assert kinds == ([WeightGroupFault] if is_stopped else [Ready, WeightGroupFault])


def test_a_long_tmpdir_does_not_keep_an_actor_from_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("t" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def story() -> None:
        async with connected() as (line, _):
            assert line.is_open

    asyncio.run(story())
