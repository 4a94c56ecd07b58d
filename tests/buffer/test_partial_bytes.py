"""Bytes of unfinished completions: bounded per task, and given back when memory is short."""

from __future__ import annotations

from buffer import operations
from buffer.operations.values import BeatLine, LeasedTask
from tests.buffer.support.run_in_store import TTL_MS, RunInStore

MAX_BYTES = 100


def beat(run: RunInStore, task: LeasedTask, offset: int, tokens: int, size: int) -> tuple[str, int]:
    line = BeatLine(task.task_id, task.fence, offset, tokens, b"x" * size)
    call = operations.beat(ttl_ms=TTL_MS, lines=[line], max_bytes=MAX_BYTES, max_attempts=2)
    return run.store.run(call)[0]


def stored(run: RunInStore, task: LeasedTask) -> tuple[int, int]:
    """Bytes of its chunks, and what its field says of them."""
    key = f"{run.prefix}:t:{task.task_id}"
    chunks = run.redis.lrange(f"{key}:p", 0, -1)
    return sum(len(chunk) for chunk in chunks), int(run.redis.hget(key, "bytes") or 0)


def test_many_small_chunks_are_asked_for_in_one(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]
    for i in range(5):
        assert beat(run, task, i, 1, 20) == ("OK", i + 1)

    assert beat(run, task, 5, 1, 20) == ("GAP", 0)
    assert stored(run, task) == (100, 100), "nothing goes before the whole is there"
    assert beat(run, task, 0, 6, 30) == ("OK", 6)
    assert stored(run, task) == (30, 30)
    assert beat(run, task, 6, 1, 20) == ("OK", 7)

    run.expire([task])
    assert run.lease(1)[0].length == 7


def test_a_shorter_copy_of_the_first_chunk_replaces_nothing(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]
    assert beat(run, task, 0, 3, 30) == ("OK", 3)
    assert beat(run, task, 3, 3, 30) == ("OK", 6)

    assert beat(run, task, 0, 3, 30) == ("OK", 6)
    assert beat(run, task, 0, 6, 30) == ("OK", 6)
    assert stored(run, task) == (60, 60)


def test_more_bytes_than_an_episode_can_have_end_the_lease(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]
    assert beat(run, task, 0, 3, 60) == ("OK", 3)

    assert beat(run, task, 3, 3, 101) == ("TAKEN", 3)
    assert beat(run, task, 3, 1, 1) == ("STALE", 0)

    again = run.lease(1)[0]
    assert (again.task_id, again.length) == (task.task_id, 3), "what is possible stays"
    assert beat(run, again, 0, 9, 101) == ("TAKEN", 3)
    assert stored(run, task) == (60, 60)
    assert run.stats().dead == 1


def test_a_lease_that_lasts_too_long_is_over_however_often_it_brings_a_token(
    run: RunInStore,
) -> None:
    run.create(1)
    task = run.lease()[0]
    line = BeatLine(task.task_id, task.fence, 0, 1, b"x")
    assert run.store.run(operations.beat(ttl_ms=TTL_MS, lines=[line], longest_ms=60_000))[0] == (
        "OK",
        1,
    )
    old = task.fence - 61 * 10**6  # microseconds
    run.redis.hset(f"{run.prefix}:t:{task.task_id}", "fence", old)

    line = BeatLine(task.task_id, old, 1, 1, b"x")
    call = operations.beat(ttl_ms=TTL_MS, lines=[line], longest_ms=60_000)

    assert run.store.run(call) == [("TAKEN", 1)]
    assert run.stats().ready == 1


def test_an_undeliverable_task_is_cut_and_charged(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]
    beat(run, task, 0, 3, 60)
    (other,) = [t for t in run.lease() if t.task_id == task.task_id] or [task]

    call = operations.cut([(other.task_id, other.fence)], max_attempts=2)
    assert run.store.run(call) == ["OK"]
    assert stored(run, task) == (0, 0)
    again = run.lease(1)[0]
    assert (again.task_id, again.length) == (task.task_id, 0)

    assert run.store.run(operations.cut([(task.task_id, task.fence)], max_attempts=2)) == ["STALE"]
    assert run.store.run(operations.cut([(task.task_id, again.fence)], max_attempts=2)) == ["OK"]
    assert run.stats().dead == 1


def test_waiting_tasks_give_their_chunks_back_largest_first(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    for task, size in zip(tasks, (30, 90, 60, 50), strict=True):
        beat(run, task, 0, 3, size)
    run.expire(tasks[:3])

    assert run.store.run(operations.shrink(100)) == (2, 150)
    assert [stored(run, task) for task in tasks] == [(30, 30), (0, 0), (0, 0), (50, 50)]
    assert beat(run, tasks[1], 3, 1, 10) == ("GAP", 0), "its last holder sends it again"
    assert run.store.run(operations.shrink(1000)) == (1, 30)
    assert run.store.run(operations.shrink(1000)) == (0, 0)
