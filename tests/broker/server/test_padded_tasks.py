"""Tasks that somebody filled with bytes and gave back: whoever goes on with one loses nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from broker.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    TaskVerdict,
    Verdict,
)
from buffer import operations
from buffer.record.codec import decode_completion, encode_completion, join_completions
from buffer.record.episode import Completion, FenceRun
from tests.broker.support.records import completion
from tests.broker.support.ring import FIRST, begin, ring

NAME = "x" * 200


async def leased(actor: BrokerClient) -> Lease:
    (lease,) = (await actor.lease(LeaseRequest(1, FIRST), deadline_s=5)).leases
    return lease


async def give_back(actor: BrokerClient, lease: Lease) -> None:
    await actor.release(ReleaseRequest(((lease.task_id, lease.fence),)))


async def store(actor: BrokerClient, lease: Lease, offset: int, made: Completion) -> TaskVerdict:
    tokens = len(made.token_ids)
    beat = Beat(lease.task_id, lease.fence, offset, tokens, encode_completion(made))
    (verdict,) = (await actor.beat(BeatRequest((beat,), FIRST), deadline_s=5)).verdicts
    return verdict


async def pad(evil: BrokerClient) -> int:
    """Long names until a task takes no more of them; returns its tokens."""
    lease = await leased(evil)
    length = 0
    for tokens, name in ((25, NAME), (5, NAME), (1, NAME), (1, "x")):
        while True:
            names = tuple(FenceRun(lease.fence, name[i % 2 :], i) for i in range(tokens))
            made = replace(completion(lease.fence, tokens), fences=names)
            if (await store(evil, lease, length, made)).verdict is not Verdict.OK:
                break
            length += tokens
    await give_back(evil, lease)
    return length


def test_who_goes_on_with_a_padded_task_loses_nothing(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            length = await pad(await here.actor("evil"))
            assert length > 50
            for name in ("first", "second"):
                honest = await here.actor(name)
                lease = await leased(honest)
                assert lease.length == length, "what was made before is kept"
                known = join_completions([decode_completion(chunk) for chunk in lease.chunks])

                own = completion(lease.fence, 20, name)
                assert (await store(honest, lease, length, own)).verdict is Verdict.OK
                all_of_it = join_completions([known, completion(lease.fence, 40, name)])
                verdict = await store(honest, lease, 0, all_of_it)

                length += 40
                assert (verdict.verdict, verdict.length) == (Verdict.OK, length)
                await give_back(honest, lease)
            stats = await here.store.run(operations.stats())
            assert (stats.dead, stats.ready) == (0, 2)

    asyncio.run(story())


def test_a_few_tokens_on_a_padded_task_wait_until_there_are_more(
    redis_url: str, keys: Path
) -> None:
    """A chunk of one token has more bytes than two tokens may have: it is kept by its actor."""

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            length = await pad(await here.actor("evil"))
            honest = await here.actor("honest")
            lease = await leased(honest)
            known = join_completions([decode_completion(chunk) for chunk in lease.chunks])
            one, more = (completion(lease.fence, tokens, "honest") for tokens in (1, 30))

            verdict = await store(honest, lease, length, one)
            assert (verdict.verdict, verdict.length) == (Verdict.GAP, 0)
            verdict = await store(honest, lease, 0, join_completions([known, more]))
            assert (verdict.verdict, verdict.length) == (Verdict.OK, length + 30)

    asyncio.run(story())
