"""Bytes of unfinished completions: bounded per task, and given back when memory is short."""

from __future__ import annotations

from buffer import operations
from buffer.operations.values import NEWEST, BeatLine, LeasedTask
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
    assert beat(run, again, 0, 4, 115) == ("TAKEN", 3)
    assert stored(run, task) == (60, 60)
    assert run.stats().dead == 1


def _charges(run: RunInStore, task: LeasedTask) -> tuple[object, ...]:
    key = f"{run.prefix}:t:{task.task_id}"
    return tuple(run.redis.hmget(key, "att", "fails", "lost_by"))


def _filled_and_given_back(run: RunInStore, size: int) -> LeasedTask:
    """Give a task a token of so many bytes, and give it back."""
    run.create(1)
    task = run.lease()[0]
    assert beat(run, task, 0, 1, size) == ("OK", 1)
    run.store.run(operations.release([(task.task_id, task.fence)]))
    return task


def test_bytes_that_came_with_a_lease_are_not_charged_to_whoever_resumes_it(
    run: RunInStore,
) -> None:
    padded = _filled_and_given_back(run, 95)

    task = run.lease(1)[0]
    assert (task.task_id, task.length) == (padded.task_id, 1)
    assert beat(run, task, 1, 1, 19) == ("GAP", 0), "its own token takes no more than 18"
    assert beat(run, task, 0, 2, 114) == ("GAP", 0), "nor where all are sent"
    assert stored(run, task) == (95, 95)
    assert beat(run, task, 1, 1, 18) == ("OK", 2)
    assert beat(run, task, 0, 3, 131) == ("OK", 3)

    assert stored(run, task) == (131, 131)
    assert _charges(run, task) == (None, None, None)


def test_however_often_a_task_is_padded_its_bytes_are_bounded_by_its_tokens(
    run: RunInStore,
) -> None:
    task = _filled_and_given_back(run, 100)
    for tokens in range(2, 12):
        task = run.lease(1)[0]
        most = min(200, 100 + 18 * (tokens - 1))
        assert beat(run, task, 0, tokens, most + 1) == ("GAP", 0)
        assert beat(run, task, 0, tokens, most) == ("OK", tokens)
        run.store.run(operations.release([(task.task_id, task.fence)]))

    assert stored(run, task) == (200, 200)


def test_an_episode_that_begins_again_was_given_nothing(run: RunInStore) -> None:
    _filled_and_given_back(run, 95)

    def store(offset: int, tokens: int, size: int) -> tuple[str, int]:
        fence = task.fence
        line = BeatLine(task.task_id, fence, offset, tokens, b"x" * size, "", NEWEST, fence, fence)
        call = operations.beat(ttl_ms=TTL_MS, lines=[line], max_bytes=MAX_BYTES, max_attempts=2)
        return run.store.run(call)[0]

    task = run.lease(1)[0]
    assert store(0, 1, 101) == ("TAKEN", 1)
    task = run.lease(1)[0]
    assert store(0, 1, 90) == ("OK", 1)
    assert store(1, 1, 20) == ("GAP", 0), "90 of its bytes are its own"
    assert store(0, 2, 101) == ("TAKEN", 1)


def test_who_adds_more_than_an_episode_has_is_charged_whatever_came_with_the_lease(
    run: RunInStore,
) -> None:
    _filled_and_given_back(run, 60)

    for offset, size in ((0, 111), (1, 101)):
        task = run.lease(1)[0]
        assert beat(run, task, offset, 2, size) == ("TAKEN", 1)
        assert stored(run, task) == (60, 60), "what was possible stays"
    assert _charges(run, task)[0] == b"2"


def test_what_came_with_a_lease_counts_even_where_it_was_given_back_for_memory(
    run: RunInStore,
) -> None:
    _filled_and_given_back(run, 95)
    task = run.lease(1)[0]
    run.expire([task])
    run.store.run(operations.shrink(1))
    assert beat(run, task, 1, 1, 10) == ("GAP", 0)
    before = _charges(run, task)

    assert beat(run, task, 0, 2, 114) == ("GAP", 0)
    assert beat(run, task, 0, 2, 113) == ("OK", 2)

    assert _charges(run, task) == before
    assert run.stats().leased == 4


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


def test_what_cannot_be_delivered_goes_and_a_task_too_large_without_it_is_charged(
    run: RunInStore,
) -> None:
    run.create(1)
    task = run.lease()[0]
    beat(run, task, 0, 3, 60)

    def cut(fence: int) -> list[str]:
        return run.store.run(operations.cut([(task.task_id, fence)], max_attempts=2))

    assert cut(task.fence) == ["OK"]
    assert stored(run, task) == (0, 0)
    assert _charges(run, task) == (None, None, None), "whoever resumes it has not made it"
    for attempt in (1, 2):
        again = run.lease(1)[0]
        assert (again.task_id, again.length) == (task.task_id, 0)
        assert cut(task.fence) == ["STALE"]
        assert cut(again.fence) == ["OK"]
        assert run.stats().dead == attempt - 1


def test_waiting_tasks_give_their_chunks_back_largest_first(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    for task, size in zip(tasks, (60, 60, 90, 50), strict=True):
        beat(run, task, 0, 3, size)
    run.expire(tasks[:3])

    assert run.store.run(operations.shrink(100)) == (2, 150)
    assert [stored(run, task) for task in tasks] == [(0, 0), (60, 60), (0, 0), (50, 50)], (
        "of two alike, the first"
    )
    assert beat(run, tasks[2], 3, 1, 10) == ("GAP", 0), "its last holder sends it again"
    assert run.store.run(operations.shrink(1000)) == (1, 60)
    assert run.store.run(operations.shrink(1000)) == (0, 0)
