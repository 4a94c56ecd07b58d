"""Tasks from LEASE to the buffer, over real sockets and a real Redis."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis

from broker.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    FailRequest,
    Failure,
    Figures,
    Lease,
    LeaseRequest,
    Publication,
    ReleaseRequest,
    Verdict,
)
from buffer import operations
from buffer.record.codec import decode_episode, encode_completion
from buffer.record.episode import PolicyVersion
from configs.errors import RefusedError
from tests.broker.support.records import completion, submission
from tests.broker.support.ring import (
    FIRST,
    begin,
    create,
    hello,
    ring,
    spec_of,
    until_granted,
    until_parked,
)
from tests.waiting import until


def test_a_group_goes_from_lease_to_claim(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()

            reply = await actor.lease(LeaseRequest(n=8, version=FIRST))
            assert reply.status == "OK"
            assert [lease.spec for lease in reply.leases] == [spec_of(0), spec_of(1)]
            for lease in reply.leases:
                chunk = encode_completion(completion(lease.fence))
                beat = Beat(lease.task_id, lease.fence, offset=0, num_tokens=3, chunk=chunk)
                verdicts = (await actor.beat(BeatRequest((beat,), FIRST))).verdicts
                assert (verdicts[0].verdict, verdicts[0].length) == (Verdict.OK, 3)
                first = await actor.submit(submission(lease))
                again = await actor.submit(submission(lease))
                assert first.verdicts[0].verdict is Verdict.OK
                assert again.verdicts[0].verdict is Verdict.DUP

            claim = await here.store.run(operations.claim(1, 1, 1))
            assert claim.units[0].task_ids == [0, 1]
            stored = await here.store.run(operations.records([0]))
            assert stored[0] is not None and decode_episode(stored[0]).task_id == 0

    asyncio.run(story())


def test_released_and_failed_leases_are_granted_again(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            a, b = (await actor.lease(LeaseRequest(2, FIRST))).leases

            released = await actor.release(ReleaseRequest(((a.task_id, a.fence),)))
            failed = await actor.fail(FailRequest((Failure(b.task_id, b.fence, "data", "no"),)))
            c, d = (await actor.lease(LeaseRequest(2, FIRST))).leases

            assert released.verdicts[0].verdict is Verdict.OK
            assert failed.verdicts[0].verdict is Verdict.OK
            assert {c.task_id, d.task_id} == {a.task_id, b.task_id}
            assert min(c.fence, d.fence) > max(a.fence, b.fence)
            outdated = await actor.submit(submission(a))
            assert outdated.verdicts[0].verdict is Verdict.OUTDATED

    asyncio.run(story())


def test_an_expired_lease_goes_to_another_actor_with_its_chunks(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, lease_timeout_s=0.6, reap_every_s=0.1) as here:
            await begin(here.store, groups=1)
            dead, heir = await here.actor("actor-1"), await here.actor("actor-2")
            lease, _ = (await dead.lease(LeaseRequest(2, FIRST))).leases
            chunk = encode_completion(completion(lease.fence))
            beat = Beat(lease.task_id, lease.fence, offset=0, num_tokens=3, chunk=chunk)
            await dead.beat(BeatRequest((beat,), FIRST))

            inherited: dict[int, Lease] = {}
            started = time.monotonic()
            while lease.task_id not in inherited and time.monotonic() - started < 10:
                reply = await heir.lease(LeaseRequest(2, FIRST))
                inherited |= {entry.task_id: entry for entry in reply.leases}

            resumed = inherited[lease.task_id]
            assert (resumed.length, resumed.chunks) == (3, (chunk,))
            assert resumed.fence > lease.fence
            verdicts = (await dead.submit(submission(lease))).verdicts
            assert verdicts[0].verdict is Verdict.OUTDATED

    asyncio.run(story())


def test_a_parked_request_wakes_when_work_appears(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, long_poll_s=60.0) as here:
            await begin(here.store, groups=0)
            actor = await here.actor()
            parked = asyncio.create_task(actor.lease(LeaseRequest(2, FIRST)))
            await until_parked(here)
            assert not parked.done()

            await create(here.store, range(1))
            reply = await asyncio.wait_for(parked, 10)  # long before its poll ends

            assert len(reply.leases) == 2

    asyncio.run(story())


def test_an_unserved_request_says_why_after_the_long_poll(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, long_poll_s=0.3) as here:
            await begin(here.store, groups=2, units_per_batch=1)
            actor = await here.actor()
            assert (await actor.lease(LeaseRequest(2, FIRST))).status == "OK"

            started = time.monotonic()
            waiting = await actor.lease(LeaseRequest(2, FIRST))
            assert waiting.status == "WAIT"
            assert 0.25 < time.monotonic() - started < 1.5

            await here.store.run(operations.cancel(1))
            assert (await actor.lease(LeaseRequest(2, FIRST))).status == "DONE"

    asyncio.run(story())


async def announced(actor: BrokerClient, endpoint: str) -> Publication:
    """Beat until a reply announces this endpoint: the broker reads the store now and then."""

    async def announced() -> Publication | None:
        found = (await actor.beat(BeatRequest((), FIRST))).publication
        return found if found is not None and found.endpoint == endpoint else None

    return await until(announced)


def test_new_weights_are_announced_with_the_next_reply(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=0)
            actor = await here.actor()
            fields = {"digest": "d", "endpoint": "tcp://127.0.0.1:1", "public_key": "k"}
            await here.store.run(operations.publish(1, 3, fields))

            found = await announced(actor, fields["endpoint"])

            assert found.version == PolicyVersion(1, 3)

    asyncio.run(story())


def test_a_publisher_that_moved_is_announced_for_the_same_version(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=0)
            actor = await here.actor()
            for endpoint in ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"):
                fields = {"digest": "d", "endpoint": endpoint, "public_key": "k"}
                await here.store.run(operations.publish(1, 3, fields))

                assert (await announced(actor, endpoint)).version == PolicyVersion(1, 3)

    asyncio.run(story())


@pytest.mark.slow
def test_actors_are_shown_with_their_figures_until_bye(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=0)
            actor = await here.actor()
            await actor.beat(BeatRequest((), FIRST, Figures(tokens_per_s=2.0)))

            async def seen() -> list[dict[str, str]]:
                actors = await here.store.run(operations.actors())
                return [actor.fields for actor in actors if "tokens_per_s" in actor.fields]

            (fields,) = await until(seen)
            assert fields["tokens_per_s"] == "2.0"
            assert fields["version"] == "1.0"

            await actor.bye()
            (left,) = await here.store.run(operations.actors())
            assert (left.has_left, left.is_present(60.0)) == (True, False)
            assert left.fields["tokens_per_s"] == "2.0"
            with pytest.raises(RefusedError, match="capacity must be between"):
                await actor.hello(hello("actor-1", capacity=0))

    asyncio.run(story())


@pytest.mark.slow
def test_a_full_store_grants_no_lease_and_takes_submissions(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, pause_at_memory=0.02) as here:  # of 512 MiB
            await begin(here.store, groups=2)
            actor = await here.actor()
            lease, _ = (await actor.lease(LeaseRequest(2, FIRST))).leases
            with redis.Redis.from_url(redis_url) as other:
                other.set("ballast", bytes(16 * 2**20))
                await until(lambda: here.parts.cache.is_full)

                assert (await actor.lease(LeaseRequest(2, FIRST))).status == "WAIT"
                assert (await actor.submit(submission(lease))).verdicts[0].verdict is Verdict.OK

                other.delete("ballast")
            assert await until_granted(actor, 2)

    asyncio.run(story())
