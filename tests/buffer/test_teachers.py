"""Finished tasks wait for their teacher, who leases them and hands in the same records, scored."""

from __future__ import annotations

import pytest

from buffer import operations
from buffer.operations.values import BeatLine, LeasedTask, SubmitLine
from tests.buffer.support import invariants
from tests.buffer.support.run_in_store import GROUP_SIZE, MAX_POLICY_LAG, TTL_MS, RunInStore
from tests.buffer.support.run_in_store import UNITS_PER_BATCH as UNITS


def _finish(run: RunInStore, tasks: list[LeasedTask], teacher: str = "t") -> list[str]:
    lines = [
        SubmitLine(task.task_id, task.fence, b"record %d" % task.task_id, teacher=teacher)
        for task in tasks
    ]
    return run.store.run(operations.submit(lines))


def _wanted(
    run: RunInStore, n: int = 100, *, teacher: str = "t", key: str = ""
) -> list[LeasedTask]:
    call = operations.lease(
        f"teacher {key}", ttl_ms=TTL_MS, n=n, version=(-1, -1), teacher=teacher, key=key
    )
    return run.store.run(call).tasks


def _hand_in(run: RunInStore, tasks: list[LeasedTask], by: bytes = b"", key: str = "") -> list[str]:
    lines = [
        SubmitLine(task.task_id, task.fence, task.chunks[0] + b" scored" + by, key)
        for task in tasks
    ]
    return run.store.run(operations.submit(lines))


def _expire(run: RunInStore, tasks: list[LeasedTask], *, max_attempts: int = 3) -> list[int]:
    run.redis.zadd(f"{run.prefix}:lease:score", {str(task.task_id): 1 for task in tasks}, xx=True)
    return run.store.run(operations.reap(max_attempts=max_attempts))


def _check(run: RunInStore) -> None:
    run.stats()
    invariants.check(run.redis, run.prefix, GROUP_SIZE)


def test_a_unit_is_complete_with_its_last_score(run: RunInStore) -> None:
    run.create(1)
    assert _finish(run, run.lease()) == ["OK"] * GROUP_SIZE
    assert run.claimed(1) == []
    tasks = _wanted(run)

    assert [task.task_id for task in tasks] == [0, 1, 2, 3]
    assert [task.chunks for task in tasks] == [(b"record %d" % i,) for i in range(4)]
    assert [task.spec for task in tasks] == [b"spec %d" % i for i in range(4)]
    assert _hand_in(run, tasks[1:]) == ["OK"] * 3
    _check(run)
    assert run.claimed(1) == []
    assert _hand_in(run, tasks[:1]) == ["OK"]
    assert run.claimed(1) == [0]
    records = run.store.run(operations.records([0, 3]))
    assert records == [b"record 0 scored", b"record 3 scored"]


def test_a_teacher_gets_what_waits_for_it_and_an_actor_gets_none_of_it(run: RunInStore) -> None:
    run.create(2)
    tasks = run.lease(GROUP_SIZE)
    _finish(run, tasks[:2], "sums")
    _finish(run, tasks[2:], "words")

    assert [task.task_id for task in _wanted(run, teacher="words")] == [2, 3]
    assert _wanted(run, teacher="nobody") == []
    assert [task.task_id for task in run.lease(GROUP_SIZE)] == [4, 5, 6, 7]
    stats = run.stats()
    assert (stats.unscored, stats.scoring) == ({"sums": 2, "words": 0}, 2)
    assert stats.by_state["unscored"] == 4
    _check(run)


def test_what_a_dead_teacher_had_is_scored_by_another_and_once(run: RunInStore) -> None:
    run.create(1)
    _finish(run, run.lease())
    lost = _wanted(run, key="first")
    assert _expire(run, lost) == [0, 1, 2, 3]
    again = _wanted(run, key="second")

    assert [task.chunks for task in again] == [task.chunks for task in lost]
    assert _hand_in(run, lost, b" late", "first") == ["STALE"] * GROUP_SIZE
    assert _hand_in(run, again, b" in time", "second") == ["OK"] * GROUP_SIZE
    assert _hand_in(run, again, b" twice", "second") == ["DUP"] * GROUP_SIZE
    assert _hand_in(run, lost, b" late", "first") == ["STALE"] * GROUP_SIZE
    assert run.store.run(operations.records([0])) == [b"record 0 scored in time"]
    _check(run)


def test_the_leases_of_a_teacher_are_renewed_given_back_and_bring_no_tokens(
    run: RunInStore,
) -> None:
    run.create(1)
    _finish(run, run.lease())
    first, second, *_ = _wanted(run)
    release = operations.release([(second.task_id, second.fence)])

    assert run.beat(first) == ("OK", 0)
    assert run.beat(first, 0, 3) == ("GAP", 0)
    assert run.store.run(release) == ["OK"]
    assert [task.task_id for task in _wanted(run)] == [second.task_id]
    _check(run)


def test_late_messages_of_its_actor_change_nothing_of_a_task_that_is_to_be_scored(
    run: RunInStore,
) -> None:
    run.create(1)
    task = run.lease(1)[0]
    _finish(run, [task])

    def late() -> list[object]:
        lines = [BeatLine(task.task_id, task.fence, 0, 1, b"x")]
        beat = run.store.run(operations.beat(ttl_ms=TTL_MS, lines=lines))
        row = (task.task_id, task.fence)
        fail = operations.fail(max_attempts=1, failures=[(*row, "data", "late")])
        return [
            _finish(run, [task])[0],
            beat[0].verdict,
            run.store.run(operations.release([row]))[0],
            run.store.run(fail)[0],
        ]

    assert late() == ["DUP"] * 4
    wanted = _wanted(run)
    assert late() == ["DUP"] * 4
    assert _hand_in(run, wanted) == ["OK"]
    assert late() == ["DUP"] * 4
    assert run.store.run(operations.records([task.task_id])) == [b"record 0 scored"]


def test_a_teacher_that_names_a_teacher_is_refused(run: RunInStore) -> None:
    run.create(1)
    _finish(run, run.lease())
    tasks = _wanted(run)

    assert _finish(run, tasks) == ["STALE"] * GROUP_SIZE
    assert _hand_in(run, tasks) == ["OK"] * GROUP_SIZE


def test_scoring_has_attempts_of_its_own_and_keeps_the_record_of_what_it_gives_up(
    run: RunInStore,
) -> None:
    run.create(1)
    for _ in range(2):
        run.expire(run.lease(GROUP_SIZE))
    _finish(run, run.lease())
    for _ in range(2):
        assert _expire(run, _wanted(run)) == [0, 1, 2, 3]
    only = _wanted(run, 1)
    assert _expire(run, only) == [0]

    letter = run.store.run(operations.dead_letter(0))
    assert letter is not None
    assert (letter.letter.why, letter.letter.attempts) == ("lease expired", 3)
    assert letter.record == b"record 0"
    _check(run)
    assert run.store.run(operations.requeue_dead([0])) == ["READY"]
    assert [task.chunks for task in _wanted(run, 1)] == [(b"record 0",)]
    _check(run)


def test_units_that_wait_for_a_missing_teacher_hold_new_ones_back(run: RunInStore) -> None:
    admitted = (MAX_POLICY_LAG + 1) * UNITS
    run.create(2 * admitted)
    while tasks := run.lease(GROUP_SIZE):
        _finish(run, tasks)

    assert run.lease_status() == "WAIT"
    stats = run.stats()
    assert (stats.open_units, stats.unscored) == (admitted, {"t": admitted * GROUP_SIZE})
    _hand_in(run, _wanted(run))
    run.train(1)
    assert len(run.lease(step=1)) == UNITS * GROUP_SIZE


def test_a_batch_that_a_rewound_store_has_unscored_comes_back_without_its_records(
    run: RunInStore,
) -> None:
    run.create(2)
    _finish(run, run.lease())
    _wanted(run, 2)

    run.store.run(operations.reconcile(run.lineage, 1, [0]))

    assert run.store.run(operations.records([0, 3, 4])) == [None, None, b"record 4"]
    assert [task.task_id for task in _wanted(run)] == [4, 5, 6, 7]
    _check(run)


def test_a_teacher_neither_ends_a_pause_nor_counts_as_a_holder_of_work(run: RunInStore) -> None:
    run.create(2)
    first = operations.lease("a", ttl_ms=TTL_MS, n=4, version=(run.lineage, 0), key="actor")
    lines = [
        SubmitLine(task.task_id, task.fence, b"record", "actor", teacher="t")
        for task in run.store.run(first).tasks
    ]
    run.store.run(operations.submit(lines))
    run.redis.hset(f"{run.prefix}:meta", "paused", "too many deaths")

    assert _wanted(run, key="teacher") == []
    assert run.store.run(operations.closed()).paused
    run.store.run(operations.resume())
    assert len(_wanted(run, key="teacher")) == 4
    assert run.redis.zrange(f"{run.prefix}:holders", 0, -1) == [b"actor"]


@pytest.mark.parametrize("end", ["cancel", "drop"])
def test_nothing_is_left_of_unscored_tasks_whose_unit_ends(run: RunInStore, end: str) -> None:
    run.create(1)
    _finish(run, run.lease())
    held = _wanted(run, 1)
    if end == "cancel":
        run.store.run(operations.cancel(run.lineage))
    else:
        rows = [(task.task_id, task.fence, "data", "bad") for task in [*held, *_wanted(run, 2)]]
        run.store.run(operations.fail(max_attempts=1, max_data_failures=1, failures=rows))

    assert _hand_in(run, held) == ["GONE" if end == "cancel" else "STALE"]
    assert _wanted(run) == []
    stats = run.stats()
    assert stats.by_state["unscored"] == 0
    _check(run)
