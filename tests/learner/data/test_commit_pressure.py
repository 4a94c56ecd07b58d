"""Commits that Redis memory asks for, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from buffer import operations
from buffer.operations.values import SubmitLine
from buffer.store import Store
from configs.settings import BufferSettings
from learner.data.alarms import CommitPressure
from learner.data.retrying_store import RetryingStore
from tests.buffer.support.run_in_store import GROUP_SIZE, RunInStore
from tests.waiting import wait_until

RECORD = b"x" * 400_000


@pytest.fixture
def run(redis_url: str) -> Iterator[RunInStore]:
    """A run with two trained batches of 4 records each."""
    with Store(redis_url, "run") as store, RunInStore(store, redis_url) as run:
        run.create(2)
        rows = [SubmitLine(task.task_id, task.fence, RECORD) for task in run.lease()]
        store.run(operations.submit(rows))
        run.train(1, 1)
        run.train(2, 1)
        yield run


def _pressure(run: RunInStore, limit_bytes: int) -> CommitPressure:
    return CommitPressure(
        RetryingStore(run.store), BufferSettings(max_uncommitted_bytes=limit_bytes)
    )


def test_batches_add_up_until_they_are_committed(run: RunInStore) -> None:
    pressure = _pressure(run, 5 * len(RECORD))

    assert run.store.run(operations.claim_bytes(1)) == GROUP_SIZE * len(RECORD)
    assert not pressure.is_crowded(1)
    assert pressure.is_crowded(2)
    pressure.committed(1)
    assert not pressure.is_crowded(2)


def test_a_run_commits_before_its_quota_stops_it(run: RunInStore) -> None:
    quota = BufferSettings(max_run_bytes=10 * len(RECORD))
    pressure = CommitPressure(RetryingStore(run.store), quota)

    assert not pressure.is_crowded(1)
    assert pressure.is_crowded(2)  # 8 records of at most 6


def _used_bytes_without_buffers(run: RunInStore) -> int:
    """Memory in use once Redis has freed the buffers of the connections that made the run."""
    run.store.close()
    wait_until(
        lambda: run.redis.info("memory")["mem_clients_normal"] <= len(RECORD),
        "Redis keeps the buffers of closed connections",
    )
    return run.store.run(operations.memory()).used_bytes


def test_a_redis_that_is_getting_full_is_relieved_when_that_helps(run: RunInStore) -> None:
    pressure = _pressure(run, 2**40)
    run.redis.set("something-else", b"y" * 30 * len(RECORD))
    run.redis.close()
    used = _used_bytes_without_buffers(run)
    limit = run.redis.config_get("maxmemory")["maxmemory"] or 0
    assert not pressure.is_crowded(1)

    try:
        run.redis.config_set("maxmemory", int(used * 1.25))
        assert pressure.is_crowded(1)
        run.store.run(operations.commit(run.lineage, 2))
        pressure.committed(2)
        assert run.store.run(operations.memory()).share > 0.6
        assert not pressure.is_crowded(2)
    finally:
        run.redis.config_set("maxmemory", limit)


def test_a_batch_that_is_gone_weighs_nothing(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client, Store(redis_url, "run") as store:
        assert client.dbsize() == 0
        assert store.run(operations.claim_bytes(1)) == 0
