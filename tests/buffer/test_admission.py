"""How far actors may run ahead of the learner, and with which weights."""

from __future__ import annotations

from buffer import operations
from tests.buffer.support.run_in_store import (
    GROUP_SIZE,
    MAX_POLICY_LAG,
    UNITS_PER_BATCH,
    RunInStore,
)


def test_admission_counts_open_buffered_and_training_units(run: RunInStore) -> None:
    run.create(12)
    cap = (MAX_POLICY_LAG + 1) * UNITS_PER_BATCH
    tasks = run.lease()
    assert len(tasks) == cap * GROUP_SIZE

    run.submit(tasks)
    assert run.lease_status() == "WAIT"  # buffered units count

    run.claimed(1)
    run.store.run(operations.seal(run.lineage, 1))
    assert run.lease_status() == "WAIT"  # so does a batch in training

    run.store.run(operations.advance(run.lineage, 1))
    assert len(run.lease(step=1)) == UNITS_PER_BATCH * GROUP_SIZE


def test_an_actor_with_old_weights_is_admitted_for_less(run: RunInStore) -> None:
    run.create(12)
    run.store.run(operations.advance(run.lineage, 1))
    assert len(run.lease(step=0)) == UNITS_PER_BATCH * GROUP_SIZE
    assert len(run.lease(step=1)) == UNITS_PER_BATCH * GROUP_SIZE

    run.store.run(operations.advance(run.lineage, 5))
    assert run.lease(step=3) == []


def test_lag_of_an_abandoned_branch_counts_both_ways(run: RunInStore) -> None:
    run.create(12)
    old = run.lineage
    run.store.run(operations.advance(old, 4))
    run.store.run(operations.begin_lineage(old, 4))

    assert run.lease_status(version=(old, 6)) == "WAIT"  # two batches off the branch
    assert run.lease_status(version=(old + 2, 4)) == "WAIT"  # no such lineage yet
    assert run.lease_status(version=(old, 2)) == "WAIT"
    assert run.lease_status(4, version=(old, 3)) == "OK"  # before the fork: part of this history
    assert run.lease_status(4, version=(old, 4)) == "OK"


def test_a_started_unit_is_refused_only_to_weights_that_are_too_old(run: RunInStore) -> None:
    run.create(12)
    tasks = run.lease()
    run.store.run(operations.advance(run.lineage, 9))
    run.expire(tasks[:1])

    assert run.lease(step=0) == []
    assert [task.task_id for task in run.lease(step=9)] == [tasks[0].task_id]
