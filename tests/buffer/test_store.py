"""The two clients: scripts, errors, and that nothing is ever sent twice."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import redis

from buffer import operations
from buffer.client.address import without_password
from buffer.client.errors import explain
from buffer.store import AsyncStore, Store
from configs.errors import StoreError, StoreUnreachable
from tests.buffer.support.run_in_store import GROUP_SIZE, TTL_MS, RunInStore


def test_scripts_are_loaded_again_after_redis_forgot_them(run: RunInStore) -> None:
    run.create(1)
    run.redis.script_flush()

    assert run.lease_status() == "OK"


def test_the_asyncio_client_loads_them_again_too(run: RunInStore, redis_url: str) -> None:
    async def ask_twice() -> None:
        store = AsyncStore(redis_url, "run")
        for _ in range(2):
            run.redis.script_flush()
            assert (await store.run(operations.stats())).state == "RUNNING"
        await store.close()

    asyncio.run(ask_twice())


def test_a_replica_takes_no_writes_and_is_worth_another_try(run: RunInStore) -> None:
    run.create(1)
    run.redis.replicaof("127.0.0.1", 1)
    try:
        with pytest.raises(StoreUnreachable, match="read-only replica"):
            run.lease()
    finally:
        run.redis.replicaof("NO", "ONE")
    assert len(run.lease()) == GROUP_SIZE


def test_the_asyncio_client_runs_the_same_operations(run: RunInStore, redis_url: str) -> None:
    run.create(4)

    async def lease_twice() -> list[int]:
        store = AsyncStore(redis_url, "run")
        version = (run.lineage, 0)
        calls = [operations.lease("b", ttl_ms=TTL_MS, n=GROUP_SIZE, version=version)] * 2
        answers = await asyncio.gather(*(store.run(call) for call in calls))
        await store.ping()
        await store.close()
        return [task.task_id for answer in answers for task in answer.tasks]

    assert sorted(asyncio.run(lease_twice())) == list(range(2 * GROUP_SIZE))


def test_memory_is_reported_with_its_limit(run: RunInStore) -> None:
    memory = run.store.run(operations.memory())

    assert memory.limit_bytes == 512 * 2**20
    assert 0 < memory.share < 1


def test_runs_share_a_server_without_meeting(run: RunInStore, redis_url: str) -> None:
    with Store(redis_url, "other") as other:
        assert other.run(operations.stats()).state == "NONE"
        with pytest.raises(StoreError, match="must have the run, got no entry"):
            other.run(operations.advance(1, 1))


def test_a_wrong_password_is_named_without_showing_it(redis_url: str) -> None:
    wrong = redis_url.replace("redis://:", "redis://:not-")
    with (
        Store(wrong, "run") as store,
        pytest.raises(StoreError, match="refused the password") as error,
    ):
        store.ping()
    assert "not-" not in str(error.value)
    assert "***@127.0.0.1" in str(error.value)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{free.getsockname()[1]}/0"
        with (
            Store(url, "run") as store,
            pytest.raises(StoreError, match="cannot be reached") as error,
        ):
            store.run(operations.stats())
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (redis.exceptions.BusyLoadingError("LOADING"), "still loading"),
        (redis.exceptions.ReadOnlyError("READONLY"), "read-only replica"),
        (redis.exceptions.ResponseError("user_script: -READONLY You can't"), "read-only replica"),
        (redis.exceptions.TimeoutError("Timeout reading from socket"), "did not answer in time"),
        (redis.exceptions.ResponseError("WRONGTYPE Operation"), "Redis refused .WRONGTYPE"),
    ],
)
def test_errors_say_what_to_do(error: redis.RedisError, text: str) -> None:
    with pytest.raises(StoreError, match=text):
        raise explain(error, "lease", "run 'a' at redis://x")


def test_a_url_is_shown_without_its_password() -> None:
    assert without_password("redis://user:p@ss@host:1/0") == "redis://***@host:1/0"
    assert without_password("redis://user:p/ss@host:1/0") == "redis://***@host:1/0"
    assert without_password("redis://host:1/0") == "redis://host:1/0"


def test_a_full_redis_refuses_what_grows_and_does_what_frees(run: RunInStore) -> None:
    run.create(4)
    tasks = run.lease(12)
    run.submit(tasks[:8])
    run.redis.zadd(run.prefix + ":lease", {str(tasks[9].task_id): 1})
    run.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreError, match="Redis is full"):
            run.submit(tasks[8:9])
        with pytest.raises(StoreError, match="Redis is full"):
            run.create(1, first=9)
        assert run.store.run(operations.release([(tasks[8].task_id, tasks[8].fence)])) == ["OK"]
        assert run.store.run(operations.reap(max_attempts=3)) == [tasks[9].task_id]
        failure = (tasks[10].task_id, tasks[10].fence, "data", "bad")
        call = operations.fail(max_attempts=1, max_data_failures=1, failures=[failure])
        assert run.store.run(call) == ["OK"]
        run.train(1, 1)
        assert run.store.run(operations.commit(run.lineage, 1)) == GROUP_SIZE
        run.store.run(operations.claim(run.lineage, 2, 1))
        assert run.store.run(operations.drop(run.lineage, 2, [1], "stale")) == GROUP_SIZE
        run.store.run(operations.actor_seen({"a": {"x": "1"}}))
        run.store.run(operations.broker_seen("b", {"y": 1.0}))
        run.store.run(operations.write_run_snapshot(run.lineage, b"{}"))
        run.store.run(operations.publish(run.lineage, 1, {"digest": "d"}))
        run.lineage = run.store.run(operations.begin_lineage(run.lineage, 1)) or 0
        assert run.store.run(operations.cancel(run.lineage)) == 7
    finally:
        run.redis.config_set("maxmemory", 512 * 2**20)
    stats = run.stats()
    assert (stats.committed, stats.dead, stats.cancelled) == (GROUP_SIZE, 1, 7)


@pytest.mark.parametrize(
    ("place", "state"),
    [("ready", "D"), ("lease", "R"), ("done", "L"), ("claimed", "X"), ("dead", "R")],
)
def test_a_task_that_contradicts_where_it_is_is_named(
    run: RunInStore, place: str, state: str
) -> None:
    run.create(1)
    run.redis.delete(*(f"{run.prefix}:{name}" for name in ("ready", "lease")))
    for task in (2, 3):
        if place in ("done", "claimed"):
            run.redis.sadd(f"{run.prefix}:{place}", task)
        else:
            run.redis.zadd(f"{run.prefix}:{place}", {str(task): task})
        run.redis.hset(f"{run.prefix}:t:{task}", "st", state)

    named = [f"task {task} is in {place} and has state {state}" for task in (2, 3)]
    assert sorted(run.store.run(operations.audit())) == named


@contextmanager
def _reply_dropper(url: str) -> Iterator[tuple[str, list[bytes]]]:
    """A proxy to Redis that passes EVALSHA on but closes the connection instead of answering it."""
    port = urlsplit(url).port
    assert port is not None
    seen: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                while request := client.recv(65536):
                    server.sendall(request)
                    reply = server.recv(65536)
                    if b"EVALSHA" in request:
                        seen.append(request)
                        break
                    client.sendall(reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield url.replace(f":{port}/", f":{listener.getsockname()[1]}/"), seen
    finally:
        stopped.set()
        thread.join(10)
        listener.close()


def test_a_call_whose_reply_was_lost_is_not_sent_again(run: RunInStore, redis_url: str) -> None:
    operation = operations.claim(run.lineage, 1, 1, start=True)
    run.store.run(operation)  # Redis knows the script now
    with _reply_dropper(redis_url) as (url, seen):
        with Store(url, "run") as store, pytest.raises(StoreError, match="cannot be reached"):
            store.run(operation)
        assert len(seen) == 1

        async def once() -> None:
            store = AsyncStore(url, "run")
            with pytest.raises(StoreError, match="cannot be reached"):
                await store.run(operation)
            await store.close()

        asyncio.run(once())
        assert len(seen) == 2

    assert run.store.run(operation).starts == 4
