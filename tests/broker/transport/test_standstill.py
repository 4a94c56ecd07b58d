"""A store that stands still, and a line full of one call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis

from broker.protocol.messages import Beat, BeatRequest, LeaseRequest, Verdict
from buffer import operations
from buffer.store import AsyncStore
from tests.broker.support.ring import FIRST, RUN, begin, ring


@pytest.mark.parametrize("mode", ["ALL", "WRITE"])
def test_a_store_that_stands_still_costs_no_lease(redis_url: str, keys: Path, mode: str) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=20)
            actor = await here.actor()
            held = list((await actor.lease(LeaseRequest(4, FIRST))).leases)
            with redis.Redis.from_url(redis_url) as client:
                client.execute_command("CLIENT", "PAUSE", 1200, mode)
            held += (await actor.lease(LeaseRequest(2, FIRST), deadline_s=20)).leases
            beats = tuple(Beat(lease.task_id, lease.fence, 0, 0, b"") for lease in held)

            reply = await actor.beat(BeatRequest(beats, FIRST), deadline_s=20)

            assert [line.verdict for line in reply.verdicts] == [Verdict.OK] * 6
            assert (await here.store.run(operations.stats())).leased == 6

    asyncio.run(story())


def test_one_large_call_does_not_end_those_behind_it(redis_url: str) -> None:
    """Nine megabytes on the connection that all calls share."""

    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=1)
        large = operations.actor_seen({"evil": {f"{i:0450d}": "1.0" for i in range(20_001)}})
        first = asyncio.create_task(store.run(large))
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(store.run(operations.stats()) for _ in range(8)))
            await first
        assert [stats.state for stats in answers] == ["RUNNING"] * 8
        await store.close()

    asyncio.run(story())
