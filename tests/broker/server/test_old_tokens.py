"""Tokens of weights that their sender cannot have had: they reach no group of others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path

from broker.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    Submission,
    SubmitRequest,
    Verdict,
)
from buffer import operations
from buffer.record.codec import decode_episode, encode_completion, encode_episode
from buffer.record.episode import PolicyVersion, VersionSpan
from learner.data.policy_lag import oldest_lag
from tests.broker.support.records import completion, record_of
from tests.broker.support.ring import FIRST, GROUP, Ring, begin, create, ring

NOW = PolicyVersion(1, 1)


def chunk_of(lease: Lease, version: PolicyVersion, offset: int = 0, tokens: int = 3) -> BeatRequest:
    made = replace(completion(lease.fence, tokens), versions=(VersionSpan(version, 0),))
    beat = Beat(lease.task_id, lease.fence, offset, tokens, encode_completion(made))
    return BeatRequest((beat,), NOW)


def record(lease: Lease, version: PolicyVersion) -> SubmitRequest:
    """An episode whose first token is of a version, and the others of the newest."""
    episode = decode_episode(record_of(lease))
    spans = (VersionSpan(version, 0), VersionSpan(NOW, 1))
    made = replace(episode.completion, versions=spans)
    data = encode_episode(replace(episode, completion=made))
    return SubmitRequest((Submission(lease.task_id, lease.fence, data),))


async def one_batch_later(here: Ring) -> None:
    """One batch is trained, no lag is allowed, and there is a group to begin."""
    await begin(here.store, groups=1, units_per_batch=1)
    first = await here.actor("first")
    for lease in (await first.lease(LeaseRequest(GROUP, FIRST))).leases:
        await first.submit(
            SubmitRequest((Submission(lease.task_id, lease.fence, record_of(lease)),))
        )
    await here.store.run(operations.claim(1, 1, 1))
    await here.store.run(operations.seal(1, 1))
    await here.store.run(operations.advance(1, 1))
    fields = {"digest": "d", "endpoint": "tcp://here", "public_key": "k"}
    await here.store.run(operations.publish(1, 1, fields))
    await create(here.store, range(1, 2))


async def leased(actor: BrokerClient, n: int = GROUP) -> tuple[Lease, ...]:
    return (await actor.lease(LeaseRequest(n, NOW), deadline_s=5)).leases


async def largest_lag(here: Ring) -> int:
    """Finish what is left as an honest actor does; the lag of the group in the next batch."""
    honest = await here.actor("honest")
    for lease in await leased(honest):
        assert lease.length == 0, "the tokens of another are to be continued"
        await honest.submit(record(lease, NOW))
    claim = await here.store.run(operations.claim(1, 2, 1))
    ((_, tasks),) = claim.units
    found = await here.store.run(operations.records(tasks))
    episodes = [decode_episode(one) for one in found if one is not None]
    return max(oldest_lag(episode, 2, 1, {1: 0}) for episode in episodes)


def play(story: Coroutine[None, None, None]) -> None:
    asyncio.run(story)


def test_a_chunk_of_old_weights_is_not_continued_by_others(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await one_batch_later(here)
            evil = await here.actor("evil")
            leases = await leased(evil)

            verdicts = [(await evil.beat(chunk_of(t, FIRST))).verdicts[0].verdict for t in leases]
            await evil.release(ReleaseRequest(tuple((t.task_id, t.fence) for t in leases)))

            assert verdicts == [Verdict.OUTDATED] * GROUP
            assert await largest_lag(here) == 0

    play(story())


def test_an_episode_of_old_weights_is_made_again_by_others(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await one_batch_later(here)
            evil = await here.actor("evil")

            verdicts = [
                (await evil.submit(record(lease, FIRST))).verdicts[0].verdict
                for lease in await leased(evil)
            ]

            assert verdicts == [Verdict.OUTDATED] * GROUP
            assert await largest_lag(here) == 0

    play(story())


def test_an_actor_of_old_weights_is_given_no_task_of_a_group_that_has_begun(
    redis_url: str, keys: Path
) -> None:
    """It could say that its weights are as old as its tokens."""

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await one_batch_later(here)
            evil = await here.actor("evil")
            leases = await leased(evil)
            await evil.release(ReleaseRequest(tuple((t.task_id, t.fence) for t in leases)))

            assert not (await evil.lease(LeaseRequest(GROUP, FIRST), deadline_s=5)).leases
            assert await largest_lag(here) == 0

    play(story())


def test_tokens_that_grow_old_with_their_lease_are_taken(redis_url: str, keys: Path) -> None:
    """Its holder had these weights when it leased, and so had the one that it resumes."""

    async def story() -> None:
        async with ring(redis_url, keys, max_actors_per_key=2) as here:
            await begin(here.store, groups=1)
            fields = {"digest": "d", "endpoint": "tcp://here", "public_key": "k"}
            await here.store.run(operations.publish(1, 0, fields))
            slow = await here.actor("slow")
            (lease, _) = (await slow.lease(LeaseRequest(GROUP, FIRST))).leases
            await here.store.run(operations.publish(1, 1, fields | {"digest": "e"}))

            first = await slow.beat(chunk_of(lease, FIRST))
            await slow.release(ReleaseRequest(((lease.task_id, lease.fence),)))
            next_one = await here.actor("next")
            (resumed,) = await leased(next_one, 1)
            whole = await next_one.beat(chunk_of(resumed, FIRST, tokens=4))
            made = await next_one.submit(record(resumed, FIRST))

            assert resumed.length == 3
            found = [reply.verdicts[0].verdict for reply in (first, whole, made)]
            assert found == [Verdict.OK] * 3

    play(story())
