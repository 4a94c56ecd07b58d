"""Batches that are trained are committed, and the end of a run cancels the rest."""

from __future__ import annotations

import pytest

from buffer import operations
from buffer.operations.operation import Operation, ScriptCall, Steps, repeated
from configs.errors import StoreError
from tests.buffer.support.run_in_store import (
    GROUP_SIZE,
    RunInStore,
)


def test_a_commit_leaves_one_bit_per_task(run: RunInStore) -> None:
    run.fill(2)
    keys = len(run.redis.keys("*"))
    run.train(1)

    assert run.store.run(operations.commit(run.lineage, 1)) == 2 * GROUP_SIZE
    assert run.store.run(operations.commit(run.lineage, 1)) == 0

    assert len(run.redis.keys("*")) < keys - 2 * GROUP_SIZE
    assert not run.redis.keys("*:t:*")
    stats = run.stats()
    assert (stats.committed, stats.committed_step, stats.claimed) == (2 * GROUP_SIZE, 1, 0)
    assert run.create(2) == 0  # known for ever
    with pytest.raises(StoreError, match="later than the committed ones"):
        run.store.run(operations.claim(run.lineage, 1, 2))


def test_a_commit_of_many_tasks_works_in_slices(run: RunInStore) -> None:
    units = 300
    run.redis.hset(run.prefix + ":meta", "units_per_batch", units)
    run.fill(units)

    run.train(1, units)

    assert run.store.run(operations.commit(run.lineage, 1)) == units * GROUP_SIZE
    assert run.stats().claims == ()


def test_only_trained_and_sealed_batches_are_committed(run: RunInStore) -> None:
    run.fill(2)
    run.claimed(1)
    with pytest.raises(StoreError, match="must be trained, got one > 0"):
        run.store.run(operations.commit(run.lineage, 1))
    run.store.run(operations.advance(run.lineage, 1))
    with pytest.raises(StoreError, match="must be sealed, got batch 1"):
        run.store.run(operations.commit(run.lineage, 1))
    with pytest.raises(StoreError, match="got none in batch 2"):
        run.store.run(operations.seal(run.lineage, 2))
    with pytest.raises(StoreError, match="must not decrease"):
        run.store.run(operations.advance(run.lineage, 0))


def test_the_last_member_of_a_group_is_committed_alone(run: RunInStore) -> None:
    run.redis.hset(f"{run.prefix}:meta", "min_group_size", 1)
    run.create(1)
    last, *others = run.lease()
    rows = [(task.task_id, task.fence, "data", "bad") for task in others]
    run.store.run(operations.fail(max_attempts=1, max_data_failures=1, failures=rows))
    run.submit([last])
    run.train(1, 1)

    assert run.store.run(operations.commit(run.lineage, 1)) == 1

    assert (run.stats().committed, run.stats().dead, run.stats().claimed) == (1, 3, 0)


def test_a_call_moves_no_more_than_it_was_asked_to_over_all_batches(run: RunInStore) -> None:
    run.fill(4)
    for k in (1, 2):
        run.train(k, 2)

    def one_call() -> Steps[object]:
        return (yield ScriptCall("commit", (run.lineage, 2, GROUP_SIZE)))

    moved = [run.store.run(Operation("commit", one_call)) for _ in range(4)]

    assert moved == [[GROUP_SIZE, 1]] * 3 + [[GROUP_SIZE, 0]]


def test_the_end_of_a_run_cancels_what_is_not_trained(run: RunInStore) -> None:
    run.create(12)
    run.create_eval(3, step=1)
    tasks = run.lease(12 * GROUP_SIZE)
    run.submit(tasks[: 8 * GROUP_SIZE])
    run.train(1)
    run.claimed(2)
    run.store.run(operations.commit(run.lineage, 1))

    assert run.store.run(operations.cancel(run.lineage)) == 10 * GROUP_SIZE
    assert run.store.run(operations.cancel(run.lineage)) == 0

    stats = run.stats()
    assert stats.created == stats.committed + stats.cancelled == 12 * GROUP_SIZE
    assert run.lease_status() == "DONE"
    assert run.submit(tasks[-1:]) == ["GONE"]
    assert not run.redis.keys("*:t:*")


@pytest.mark.parametrize(
    ("buffered", "leased", "new"), [(3, 0, 0), (0, 3, 0), (0, 0, 3), (1, 1, 1)]
)
def test_a_run_is_cancelled_in_several_calls(
    run: RunInStore, buffered: int, leased: int, new: int
) -> None:
    run.fill(buffered)
    run.create(leased, first=buffered)
    run.lease(leased * GROUP_SIZE)
    run.create(new, first=buffered + leased)

    cancelled = run.store.run(repeated("cancel", (run.lineage, 2 * GROUP_SIZE)))

    assert cancelled == 3 * GROUP_SIZE
    assert not run.redis.keys("*:t:*")


def test_the_end_reaches_a_finished_unit_with_the_last_place_of_a_call(
    run: RunInStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.fill(1)
    run.create(1, first=1)
    monkeypatch.setattr("buffer.operations.tasks.SLICE", 2 * GROUP_SIZE)

    assert run.store.run(operations.cancel(run.lineage)) == 2 * GROUP_SIZE

    assert (run.stats().new_units, run.stats().buffered_units) == (0, 0)


def test_a_call_ends_no_more_than_it_was_asked_to_of_all_kinds(run: RunInStore) -> None:
    run.fill(2)
    run.create(1, first=2)

    def one_call() -> Steps[object]:
        return (yield ScriptCall("cancel", (run.lineage, GROUP_SIZE)))

    ended = [run.store.run(Operation("cancel", one_call)) for _ in range(4)]

    assert ended == [[GROUP_SIZE, 1]] * 3 + [[0, 0]]
