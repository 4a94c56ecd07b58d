"""Rows of concurrent requests share calls, and each request gets its own answers or the error."""

from __future__ import annotations

import asyncio

import pytest

from broker.server.service import Batch
from buffer import operations
from buffer.operations.operation import SLICE, Operation
from buffer.store import AsyncStore
from configs.errors import StoreError
from tests.broker.support.ring import FIRST, RUN, begin


def test_concurrent_rows_share_calls_and_get_their_own_answers(redis_url: str) -> None:
    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=20)
        leases = await store.run(operations.lease("a", ttl_ms=9000, n=40, version=FIRST))
        calls: list[int] = []

        def release(rows: list[tuple[int, int]]) -> Operation[list[str]]:
            calls.append(len(rows))
            return operations.release(rows)

        batch = Batch(store, release)
        asked = [
            batch.run([(task.task_id, task.fence - wrong), (10**9, 1)])
            for task in leases.tasks
            for wrong in (1, 0)
        ]
        answers = await asyncio.gather(*asked, batch.run([]))

        assert answers == [["STALE", "GONE"], ["OK", "GONE"]] * 40 + [[]]
        assert len(calls) <= 3
        assert sum(calls) == 160
        await store.close()

    asyncio.run(story())


def test_a_call_takes_at_most_one_slice(redis_url: str) -> None:
    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=1)
        calls: list[int] = []

        def release(rows: list[tuple[int, int]]) -> Operation[list[str]]:
            calls.append(len(rows))
            return operations.release(rows)

        batch = Batch(store, release)
        await asyncio.gather(*(batch.run([(7, 1)] * 50) for _ in range(40)))

        assert max(calls) <= SLICE
        assert sum(calls) == 2000
        await store.close()

    asyncio.run(story())


def test_an_error_reaches_every_request_and_the_next_call_is_tried() -> None:
    async def story() -> None:
        store = AsyncStore("redis://127.0.0.1:1/0", RUN)
        batch = Batch(store, operations.release)

        for _ in range(2):
            results = await asyncio.gather(
                *(batch.run([(n, 1)]) for n in range(5)), return_exceptions=True
            )
            assert all(isinstance(result, StoreError) for result in results)
        with pytest.raises(StoreError, match="cannot be reached"):
            await batch.run([(1, 1)])
        await store.close()

    asyncio.run(story())
