"""Actors that hold leases and misuse them: what they can take is what they hold, for a while."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import redis

from broker.protocol.messages import Beat, BeatRequest, LeaseRequest, ReleaseRequest, Verdict
from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.record.codec import encode_completion
from buffer.record.episode import Completion, FenceRun, VersionSpan
from tests.broker.support.ring import FIRST, RUN, Ring, begin, ring

LEAST_S = 1.0
"""An honest actor gets work again within this time."""


def long_chunk(tokens: int, fence: int) -> bytes:
    return encode_completion(
        Completion(
            token_ids=np.ones(tokens, np.int32),
            behaviour_logprobs=np.full(tokens, -1.0, np.float32),
            loss_mask=np.ones(tokens, np.uint8),
            versions=(VersionSpan(FIRST, 0),),
            fences=(FenceRun(fence, "evil", 0),),
        )
    )


def used_memory(redis_url: str) -> int:
    with redis.Redis.from_url(redis_url) as client:
        return int(client.info("memory")["used_memory"])


async def honest_lease_s(here: Ring, n: int = 2) -> float:
    """How long an actor that comes now waits for its first leases."""
    honest = await here.actor("honest")
    began = time.monotonic()
    while True:
        reply = await honest.lease(LeaseRequest(n, FIRST), deadline_s=5)
        if reply.status == "OK":
            return time.monotonic() - began
        assert time.monotonic() - began < 20, f"no work: {reply.status}"


def test_endless_snapshots_fill_no_memory(redis_url: str, keys: Path) -> None:
    """Of chunks of 200 kB on two leases, none is larger than an episode of this run can be."""

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=50)
            before = used_memory(redis_url)
            evil = await here.actor("evil")
            leases = (await evil.lease(LeaseRequest(2, FIRST))).leases
            tokens = 20_000
            chunk = long_chunk(tokens, leases[0].fence)
            for i in range(200):
                lines = tuple(
                    Beat(lease.task_id, lease.fence, i * tokens, tokens, chunk) for lease in leases
                )
                await evil.beat(BeatRequest(lines, FIRST), deadline_s=5)
            grown = used_memory(redis_url) - before
            assert grown < 2 * 2**18, f"Redis grew by {grown} bytes"
            await evil.release(ReleaseRequest(tuple((t.task_id, t.fence) for t in leases)))
            assert await honest_lease_s(here) < LEAST_S

    asyncio.run(story())


def test_a_task_made_too_large_for_a_message_goes_on_to_others(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=50)
            evil = await here.actor("evil")
            (lease,) = (await evil.lease(LeaseRequest(1, FIRST))).leases
            tokens = 20_000
            for i in range(10):  # larger together than the largest message, 1 MiB
                chunk = long_chunk(tokens, lease.fence)
                beat = Beat(lease.task_id, lease.fence, i * tokens, tokens, chunk)
                await evil.beat(BeatRequest((beat,), FIRST), deadline_s=5)
            await evil.release(ReleaseRequest(((lease.task_id, lease.fence),)))
            assert await honest_lease_s(here) < LEAST_S

    asyncio.run(story())


def test_a_task_that_no_message_can_carry_loses_its_tokens_and_at_last_dies(
    redis_url: str, keys: Path
) -> None:
    """Limits keep tasks from growing so large; a store of other settings may have one."""

    def grow() -> None:
        with redis.Redis.from_url(redis_url) as client:
            prefix = run_prefix(RUN)
            client.hset(f"{prefix}:t:0", mapping={"len": 5, "bytes": 2**21})
            client.rpush(f"{prefix}:t:0:p", bytes(2**21))

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor("actor")
            leases = (await actor.lease(LeaseRequest(2, FIRST))).leases
            for _ in range(3):
                await actor.release(ReleaseRequest(tuple((t.task_id, t.fence) for t in leases)))
                grow()
                leases = (await actor.lease(LeaseRequest(2, FIRST), deadline_s=5)).leases
                found = await here.store.run(operations.stats())
                held = {(lease.task_id, lease.length) for lease in leases}
                assert held <= {(0, 0), (1, 0)}, "tokens that nobody can be given stay"
            assert found.dead == 1

    asyncio.run(story())


def test_a_lease_that_brings_too_much_is_over(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            evil = await here.actor("evil")
            (lease,) = (await evil.lease(LeaseRequest(1, FIRST))).leases
            chunk = long_chunk(20_000, lease.fence)
            beat = Beat(lease.task_id, lease.fence, 0, 20_000, chunk)
            reply = await evil.beat(BeatRequest((beat,), FIRST), deadline_s=5)
            assert reply.verdicts[0].verdict is Verdict.STALE

    asyncio.run(story())
