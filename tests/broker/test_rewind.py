"""A broker whose Redis dies, stays away, comes back older or empty serves on, and never early."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.protocol.messages import Beat, BeatRequest, LeaseRequest, Verdict
from buffer import operations
from buffer.record.codec import encode_completion
from buffer.store import Store
from tests.broker.support.records import completion, submission
from tests.broker.support.ring import FIRST, RUN, begin, ring
from tests.learner.support.rewinding_redis import RewindingRedis, rewinding_redis
from tests.waiting import still_waits

LEASE_S = 0.6
QUICK: dict[str, Any] = {"lease_timeout_s": LEASE_S, "reap_every_s": 0.1}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RewindingRedis]:
    with rewinding_redis(tmp_path / "redis") as running:
        yield running


def recovered(server: RewindingRedis) -> None:
    """What a learner says once it has put the store right."""
    with Store(server.url, RUN) as store:
        store.run(operations.recovered(1, store.server_run_id()))


def tokens(lease_id: int, fence: int, *, offset: int, count: int) -> BeatRequest:
    chunk = encode_completion(completion(fence, tokens=count))
    return BeatRequest((Beat(lease_id, fence, offset, count, chunk),), FIRST)


@pytest.mark.slow
def test_a_redis_away_for_longer_than_a_lease_costs_no_attempt(
    server: RewindingRedis, keys: Path
) -> None:
    async def story() -> None:
        async with ring(server.url, keys, **QUICK) as here:
            await begin(here.store, groups=2)
            actor = await here.actor()
            held, other = (await actor.lease(LeaseRequest(2, FIRST))).leases
            server.kill()
            beating = asyncio.create_task(
                actor.beat(tokens(held.task_id, held.fence, offset=0, count=3))
            )
            assert await still_waits(beating, 2 * LEASE_S)

            server.start()

            assert (await beating).verdicts[0].verdict is Verdict.OK
            assert (await actor.lease(LeaseRequest(1, FIRST))).status == "WAIT", "no learner yet"
            assert (await actor.submit(submission(held))).verdicts[0].verdict is Verdict.OK
            recovered(server)
            assert (await actor.lease(LeaseRequest(2, FIRST))).status == "OK"
            seen = await here.store.run(operations.inspect([other.task_id]))
            assert (seen[other.task_id].state, seen[other.task_id].attempts) == ("L", 0)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_after_a_rewind_actors_send_again_from_what_the_store_has(
    server: RewindingRedis, keys: Path
) -> None:
    async def story() -> None:
        async with ring(server.url, keys, **QUICK | {"lease_timeout_s": 30.0}) as here:
            await begin(here.store, groups=2)
            actor = await here.actor()
            kept, _ = (await actor.lease(LeaseRequest(2, FIRST))).leases
            await actor.beat(tokens(kept.task_id, kept.fence, offset=0, count=3))
            past = await asyncio.to_thread(server.remember)
            await actor.beat(tokens(kept.task_id, kept.fence, offset=3, count=2))
            lost, _ = (await actor.lease(LeaseRequest(2, FIRST))).leases

            await asyncio.to_thread(server.restart, past)

            late = (await actor.beat(tokens(kept.task_id, kept.fence, offset=5, count=1))).verdicts
            assert (late[0].verdict, late[0].length) == (Verdict.GAP, 3)
            again = await actor.beat(tokens(kept.task_id, kept.fence, offset=3, count=3))
            assert (again.verdicts[0].verdict, again.verdicts[0].length) == (Verdict.OK, 6)
            outdated = await actor.beat(tokens(lost.task_id, lost.fence, offset=0, count=3))
            assert outdated.verdicts[0].verdict is Verdict.OUTDATED
            recovered(server)
            assert lost.task_id in {
                lease.task_id for lease in (await actor.lease(LeaseRequest(2, FIRST))).leases
            }

    asyncio.run(asyncio.wait_for(story(), 60))


def test_an_actor_waits_at_the_door_of_a_wiped_store(server: RewindingRedis, keys: Path) -> None:
    async def story() -> None:
        async with ring(server.url, keys, **QUICK) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            (held, _) = (await actor.lease(LeaseRequest(2, FIRST))).leases

            await asyncio.to_thread(server.wipe)

            assert (await actor.submit(submission(held))).verdicts[0].verdict is Verdict.GONE
            late = asyncio.create_task(here.actor("actor-2"))
            assert await still_waits(late, 0.5)
            await begin(here.store, groups=1)
            await late

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize("setting", ["maxmemory 1", "replicaof 127.0.0.1 1"])
def test_a_redis_that_takes_no_writes_is_borne(
    server: RewindingRedis, keys: Path, setting: str
) -> None:
    """Full, or a replica whose primary is away: nothing is acknowledged that was not written."""
    name, _, value = setting.partition(" ")
    undo = ("config", "set", name, "0") if name == "maxmemory" else ("replicaof", "no", "one")
    change = ("config", "set", name, value) if name == "maxmemory" else setting.split()

    async def story() -> None:
        async with ring(server.url, keys, **QUICK | {"lease_timeout_s": 30.0}) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            (held, _) = (await actor.lease(LeaseRequest(2, FIRST))).leases
            with redis.Redis.from_url(server.url) as client:
                client.execute_command(*change)
                submitting = asyncio.create_task(actor.submit(submission(held)))
                assert await still_waits(submitting, 0.6)
                client.execute_command(*undo)
            assert (await submitting).verdicts[0].verdict is Verdict.OK

    asyncio.run(asyncio.wait_for(story(), 60))
