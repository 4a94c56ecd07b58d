"""A group of two: rank 0 in this process, and the member of `worker_member.py` in one of its own.

Stories for any backend: over gloo on a CPU (`test_member_process.py`), over NCCL on two cards
(`tests/gpu/test_weight_group.py`).
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from actors.engine.weights.worker_member import serve_actor
from actors.weights.worker_line import WorkerLine
from broker.protocol.manifest import digest_of
from broker.protocol.weight_messages import Epoch
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError
from learner.weights.group import GroupPlan, SendingGroup, listen
from tests.waiting import until

NEW_PROGRAMS = multiprocessing.get_context("spawn")  # no fork of this one could use CUDA
JOIN_S, SEND_S = 60.0, 10.0
SLACK_S = 20.0


@dataclass(frozen=True, slots=True)
class Group:
    """What a story is about."""

    backend: str
    device: str
    """Of the member."""
    bucket_bytes: int
    folder: Path


class Sender:
    """Rank 0, and the invitation of the other."""

    def __init__(self, group: Group) -> None:
        listener = listen("127.0.0.1")
        self.epoch = Epoch(
            number=1,
            version=PolicyVersion(1, 1),
            fresh=True,
            backend=group.backend,
            host="127.0.0.1",
            port=listener.getsockname()[1],
            rank=1,
            size=2,
            bucket_bytes=group.bucket_bytes,
            join_s=JOIN_S,
            send_s=SEND_S,
        )
        self._listener = listener
        self._plan = GroupPlan(group.backend, "127.0.0.1", 2, JOIN_S)
        self._group: SendingGroup | None = None

    async def send(self, contents: bytes) -> None:
        """Broadcast; the first one waits for the member to join."""

        def send() -> None:
            self._group = self._group or SendingGroup(self._plan, self._listener)
            self._group.send(memory, bucket_bytes=self.epoch.bucket_bytes, send_s=SEND_S)

        memory = mmap.mmap(-1, len(contents))
        memory[:] = contents
        await asyncio.to_thread(send)

    def close(self) -> None:
        assert self._group is not None
        self._group.close()


async def a_version_arrives(group: Group, num_buckets: int) -> float:
    """One version, and a second by the same group; returns the seconds of the second."""
    contents = os.urandom(num_buckets * group.bucket_bytes)
    path, memory = staged(group.folder, len(contents))
    async with member(group.device) as (line, _):
        sender = Sender(group)
        await line.enter(sender.epoch)
        for _ in range(2):
            began = time.monotonic()
            receiving = asyncio.create_task(line.receive(path, memory))
            await sender.send(contents)
            assert await receiving == digest_of([contents])
            assert memory[:] == contents
            memory[:] = bytes(len(contents))
        sender.close()
    return time.monotonic() - began


async def a_killed_member_costs_the_deadline(group: Group, num_buckets: int) -> float:
    """Killed with half of a version; returns the seconds until the sender sees it."""
    half = os.urandom(num_buckets * group.bucket_bytes)
    path, memory = staged(group.folder, 2 * len(half))
    async with member(group.device) as (line, process):
        sender = Sender(group)
        await line.enter(sender.epoch)
        receiving = asyncio.create_task(line.receive(path, memory))
        await sender.send(half)
        await until(
            lambda: memory[: group.bucket_bytes] == half[: group.bucket_bytes], every_s=0.001
        )
        process.kill()
        with pytest.raises(WeightsError, match="worker cannot receive: it has ended"):
            await receiving
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            await sender.send(half)
        took_s = time.monotonic() - began
        sender.close()
    assert took_s < SEND_S + SLACK_S
    return took_s


async def one_that_leaves_is_free_at_once(group: Group, num_buckets: int) -> None:
    """The other half never comes; the member leaves, and is in the next group."""
    half = os.urandom(num_buckets * group.bucket_bytes)
    path, memory = staged(group.folder, 2 * len(half))
    async with member(group.device) as (line, _):
        sender = Sender(group)
        await line.enter(sender.epoch)
        receiving = asyncio.create_task(line.receive(path, memory))
        await sender.send(half)
        await until(
            lambda: memory[: group.bucket_bytes] == half[: group.bucket_bytes], every_s=0.001
        )
        line.leave_group()
        following = Sender(group)
        await line.enter(following.epoch)
        again = asyncio.create_task(line.receive(*staged(group.folder, len(half))))
        await following.send(half)
        assert await again == digest_of([half])
        with pytest.raises(WeightsError, match="the broadcast failed"):
            await receiving
        sender.close()
        following.close()


@asynccontextmanager
async def member(device: str) -> AsyncIterator[tuple[WorkerLine, BaseProcess]]:
    """A process with nothing but the worker's end of a line."""
    line = WorkerLine()
    running = asyncio.create_task(line.run())
    process = NEW_PROGRAMS.Process(target=_serve, args=(line.path, device), daemon=True)
    await asyncio.to_thread(process.start)
    try:
        await until(lambda: line.is_open, every_s=0.001)
        yield line, process
    finally:
        running.cancel()
        await asyncio.wait([running])
        process.kill()
        await asyncio.to_thread(process.join)


def staged(folder: Path, num_bytes: int) -> tuple[Path, mmap.mmap]:
    """Make a file as an actor's staging."""
    path = folder / f"staged-{num_bytes}"
    path.write_bytes(bytes(num_bytes))
    with path.open("r+b") as file:
        return path, mmap.mmap(file.fileno(), 0)


def _serve(path: str, device: str) -> None:
    serve_actor(path, device).join()
