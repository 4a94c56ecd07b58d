"""Large records through a real broker: in the object store before they are acknowledged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.protocol.messages import LeaseRequest, Verdict
from buffer import operations
from buffer.record.codec import encode_episode
from buffer.record.episode import Episode
from buffer.record.object_store import ObjectStore, is_reference
from configs.errors import DeadlineError, RefusedError
from tests.broker.support.records import completion, record_of, submission
from tests.broker.support.ring import FIRST, begin, ring


def large_record(task_id: int, fence: int) -> bytes:
    """A record of more than 1024 bytes."""
    return encode_episode(
        Episode(
            task_id=task_id,
            group_id=0,
            purpose="train",
            prompt_ids=completion(fence, tokens=4).token_ids,
            completion=completion(fence, tokens=400),
            reward=1.0,
            reward_parts={},
            finish_reason="stop",
            environment_metrics={},
            incarnation="actor-1",
            started_at=1.0,
            finished_at=2.0,
        )
    )


def test_a_large_record_goes_by_reference_and_a_small_one_does_not(
    redis_url: str, keys: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}"

    async def story() -> None:
        async with ring(redis_url, keys, object_store=url) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            small, large = (await actor.lease(LeaseRequest(n=8, version=FIRST))).leases
            record = large_record(large.task_id, large.fence)

            for _ in range(2):
                await actor.submit(submission(large, record))
            reply = await actor.submit(submission(small))

            assert reply.verdicts[0].verdict is Verdict.OK
            stored = await here.store.run(operations.records([small.task_id, large.task_id]))
            assert stored[0] == record_of(small)
            assert stored[1] is not None and is_reference(stored[1])
            assert ObjectStore(url, "test").get(large.task_id, stored[1]) == record
            references = await here.store.run(operations.references([large.task_id, 9]))
            assert references == [stored[1], b""]

    asyncio.run(story())
    assert len(list(tmp_path.rglob("*-*"))) == 1


@pytest.mark.slow
def test_nothing_is_acknowledged_while_the_object_store_refuses(
    redis_url: str, keys: Path, tmp_path: Path
) -> None:
    (tmp_path / "test").write_text("a file where the run's folder would be")

    async def story() -> None:
        async with ring(redis_url, keys, object_store=f"file://{tmp_path}") as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            lease = (await actor.lease(LeaseRequest(n=8, version=FIRST))).leases[0]
            request = submission(lease, large_record(lease.task_id, lease.fence))

            with pytest.raises((DeadlineError, RefusedError)):
                await actor.submit(request, deadline_s=1.0)
            assert await here.store.run(operations.records([lease.task_id])) == [None]

            (tmp_path / "test").unlink()
            verdicts = (await actor.submit(request)).verdicts
            assert verdicts[0].verdict is Verdict.OK

    asyncio.run(story())
