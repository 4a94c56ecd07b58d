"""A run beyond its quota of bytes pauses alone, and goes on when the learner has committed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.protocol.messages import LeaseRequest
from broker.server.store_cache import StoreCache
from buffer import operations
from buffer.record.episode import PolicyVersion
from buffer.store import AsyncStore
from tests.broker.support.records import record_of, submission
from tests.broker.support.ring import FIRST, begin, ring


def test_a_run_beyond_its_quota_pauses_alone_until_it_commits(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, max_run_bytes=600) as here:
            await begin(here.store, groups=8, units_per_batch=2)
            actor = await here.actor()
            leases = (await actor.lease(LeaseRequest(4, FIRST))).leases
            assert len(record_of(leases[0])) * 4 > 600
            for lease in leases:
                await actor.submit(submission(lease))

            assert await closes(here.store, 600)
            other = AsyncStore(redis_url, "other")
            assert not await closes(other, 600)
            await other.close()
            while (reply := await actor.lease(LeaseRequest(2, FIRST))).leases:
                await actor.submit(submission(reply.leases[0]))  # before the broker has looked
            assert reply.status == "WAIT"

            for unit in (1, 2):
                assert (await here.store.run(operations.claim(1, unit, 2))).complete
                await here.store.run(operations.seal(1, unit))
                await here.store.run(operations.advance(1, unit))
                if not await here.store.run(operations.commit(1, unit)):
                    break
                if not await closes(here.store, 600):
                    break
            assert not await closes(here.store, 600)
            for _ in range(20):  # the broker looks once a second
                if (await actor.lease(LeaseRequest(2, PolicyVersion(1, 1)))).leases:
                    return
            raise AssertionError("no work after the commit")

    asyncio.run(asyncio.wait_for(story(), 60))


async def closes(store: AsyncStore, max_run_bytes: int) -> bool:
    """Whether a broker over this store leases nothing for want of room."""
    cache = StoreCache(store, pause_at_memory=0.99, max_run_bytes=max_run_bytes)
    await cache.refresh_memory()
    return cache.is_full
