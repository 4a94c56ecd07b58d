"""Attacks of one holder of an actor's key on a scene; each is bounded in messages and seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import msgpack
import numpy as np

from benchmarks.delivery.records import NEWEST
from broker.client import BrokerClient
from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    BeatRequest,
    FailRequest,
    Failure,
    Lease,
    LeaseRequest,
    ReleaseRequest,
)
from buffer.record.codec import decode_completion
from buffer.record.episode import FenceRun, PolicyVersion, VersionSpan
from configs.errors import NyalaError
from tests.broker.attacks.scene import Scene, beat_of, completion, submission_of

Attack = Callable[[Scene], Awaitable[None]]
OLD = PolicyVersion(1, 0)


async def give_back(evil: BrokerClient, leases: tuple[Lease, ...]) -> None:
    await evil.release(ReleaseRequest(tuple((t.task_id, t.fence) for t in leases)), deadline_s=20)


async def endless_snapshots(here: Scene) -> None:
    """Chunks of 9 kB on two leases, one after the other."""
    evil = await here.actor("evil")
    for lease in await here.leases(evil, 2):
        for i in range(150):
            with suppress(NyalaError):
                await evil.beat(beat_of(lease, completion(lease.fence, 1000), 1000 * i))


async def many_names(here: Scene) -> None:
    """A chunk of few tokens with a long name for each, on tasks that are then given back."""
    evil = await here.actor("evil")
    for _ in range(10):
        leases = await here.leases(evil, 2)
        for lease in leases:
            runs = tuple(FenceRun(lease.fence, "e" * 200, i) for i in range(1000))
            made = replace(completion(lease.fence, 1000), fences=runs)
            with suppress(NyalaError):
                await evil.beat(beat_of(lease, made))
        await give_back(evil, leases)


async def foreign_tokens(here: Scene) -> None:
    """A snapshot with token 10**6, and versions to come, on tasks that are then given back."""
    evil = await here.actor("evil")
    for lease in (leases := await here.leases(evil, 8)):
        made = completion(lease.fence, 8)
        for lie in (
            replace(made, token_ids=np.full(8, 10**6, np.int32)),
            replace(made, versions=(VersionSpan(PolicyVersion(9, 0), 0),)),
        ):
            with suppress(NyalaError):
                await evil.beat(beat_of(lease, lie), deadline_s=1)
    await give_back(evil, leases)


async def long_completions(here: Scene) -> None:
    """Episodes of 8,000 tokens where 1,024 are allowed."""
    evil = await here.actor("evil")
    for lease in await here.leases(evil, 8):
        with suppress(NyalaError):
            await evil.submit(submission_of(lease, completion(lease.fence, 8000)), deadline_s=1)


async def old_tokens(here: Scene) -> None:
    """A token of the first version in a snapshot of each task, which is then given back."""
    evil = await here.actor("evil")
    for _ in range(10):
        leases = await here.leases(evil, 4)
        for lease in leases:
            spans = (VersionSpan(OLD, 0), VersionSpan(NEWEST, 1))
            made = replace(completion(lease.fence, 8), versions=spans)
            with suppress(NyalaError):
                await evil.beat(beat_of(lease, made))
        await give_back(evil, leases)


async def fences_that_go_back(here: Scene) -> None:
    """Two chunks, the second under an older fence: whoever continues them cannot."""
    evil = await here.actor("evil")
    for _ in range(10):
        leases = await here.leases(evil, 4)
        for lease in leases:
            first, second = completion(lease.fence, 4), completion(lease.fence - 1, 4)
            for made, offset in ((first, 0), (second, 4)):
                with suppress(NyalaError):
                    await evil.beat(beat_of(lease, made, offset))
        await give_back(evil, leases)


async def failures(here: Scene) -> None:
    """Everything fails at once."""
    evil = await here.actor("evil")
    for _ in range(20):
        if not (leases := await here.leases(evil, 64)):
            return
        rows = tuple(Failure(t.task_id, t.fence, "data", "x" * 500) for t in leases)
        await evil.fail(FailRequest(rows), deadline_s=20)


async def hoard(here: Scene) -> None:
    """All work there is, and nothing comes of it."""
    evil = await here.actor("evil", capacity=4096)
    for _ in range(4):
        await here.leases(evil, 4096)


async def hellos(here: Scene) -> None:
    """1,024 names on one connection."""
    async with here.socket("evil") as socket:
        for i in range(1024):
            message = encode(here.hello(f"evil-{i}"), run=here.run, incarnation=f"evil-{i}", seq=i)
            await socket.send(message)
        await asyncio.sleep(1.0)


async def many_connections(here: Scene) -> None:
    """300 connections of one key at once."""
    async with asyncio.TaskGroup() as group:
        for i in range(300):
            group.create_task(_say_hello(here, f"evil-{i}"))


async def _say_hello(here: Scene, name: str) -> None:
    async with here.socket("evil") as socket:
        with suppress(TimeoutError):
            async with asyncio.timeout(2):
                await socket.send(encode(here.hello(name), run=here.run, incarnation=name, seq=1))
                await socket.recv()


async def figures(here: Scene) -> None:
    """Heartbeats with 15,000 figures, by names of the sender's choice."""
    async with here.socket("evil") as socket:
        await socket.send(encode(here.hello("evil"), run=here.run, incarnation="evil", seq=1))
        await socket.recv()
        frame = bytes(encode(BeatRequest((), NEWEST), run=here.run, incarnation="evil", seq=2))
        body = msgpack.unpackb(frame)
        large = {f"{i}": 1.0 for i in range(15_000)}
        for _ in range(20):
            await socket.send(msgpack.packb(_with_figures(body, large)))
        await asyncio.sleep(0.5)


def _with_figures(body: object, large: dict[str, float]) -> object:
    """Put figures wherever a message has a map of its own."""
    if isinstance(body, dict):
        return {k: large if k == "stats" else _with_figures(v, large) for k, v in body.items()}
    if isinstance(body, list):
        return [_with_figures(part, large) for part in body]
    return body


async def another_name(here: Scene) -> None:
    """A LEASE, a RELEASE and a BYE in an honest actor's name, with the largest number there is."""
    async with here.socket("evil") as socket:
        hello = encode(here.hello("honest-0"), run=here.run, incarnation="honest-0", seq=1)
        await socket.send(hello)
        for message in (LeaseRequest(1, NEWEST), ReleaseRequest(())):
            frame = encode(message, run=here.run, incarnation="honest-0", seq=2**63 - 1)
            await socket.send(frame)
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                for _ in range(3):
                    reply = decode(await socket.recv(), max_bytes=2**20).message
                    here.granted += len(getattr(reply, "leases", ()))


async def fences_of_others(here: Scene) -> None:
    """Fail, release and submit under fences that were read in the chunks of resumed tasks."""
    evil = await here.actor("evil")
    for lease in await here.leases(evil, 16):
        known = {run.fence for chunk in lease.chunks for run in decode_completion(chunk).fences}
        for fence in {lease.fence, *known}:
            for task in range(lease.task_id - 8, lease.task_id + 8):
                if task == lease.task_id:
                    continue
                rows = (Failure(task, fence, "data", "x"),)
                await evil.fail(FailRequest(rows), deadline_s=20)


async def escapes(here: Scene) -> None:
    """Names and reasons that a terminal would obey."""
    with suppress(NyalaError):
        await here.actor("\x1b[2J\x1b]0;owned\x07", key="evil")
    evil = await here.actor("evil")
    leases = await here.leases(evil, 2)
    rows = tuple(Failure(t.task_id, t.fence, "data", "\x1b[2Jgone\x07") for t in leases)
    await evil.fail(FailRequest(rows), deadline_s=20)


async def flood(here: Scene) -> None:
    """Requests as fast as they go, and nobody reads the answers."""
    evil = await here.actor("evil")
    del evil
    async with here.socket("evil") as socket:
        await socket.send(encode(here.hello("evil"), run=here.run, incarnation="evil", seq=1))
        frame = encode(LeaseRequest(1, NEWEST), run=here.run, incarnation="evil", seq=2)
        for _ in range(5000):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await socket.send(frame)


async def garbage(here: Scene) -> None:
    """Bytes that mean nothing, and the largest message that there may be."""
    async with here.socket("evil") as socket:
        for size in (0, 1, 100, 10_000, 2**20 - 1) * 20:
            await socket.send(bytes(size))
        await asyncio.sleep(0.5)


ATTACKS: dict[str, Attack] = {
    attack.__name__.replace("_", " "): attack
    for attack in (
        endless_snapshots,
        many_names,
        foreign_tokens,
        long_completions,
        old_tokens,
        fences_that_go_back,
        failures,
        hoard,
        hellos,
        many_connections,
        figures,
        another_name,
        fences_of_others,
        escapes,
        flood,
        garbage,
    )
}
