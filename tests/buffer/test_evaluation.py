"""Evaluation tasks: outside admission and buffer, bound to a version, closed by the learner."""

from __future__ import annotations

import pytest

from buffer import operations
from buffer.operations.keys import EVAL_BASE
from buffer.operations.values import NewTask
from configs.errors import RecordError
from tests.buffer.support.run_in_store import GROUP_SIZE, RunInStore


def test_evaluation_goes_first_and_past_admission(run: RunInStore) -> None:
    run.create(12)
    run.lease()
    assert run.lease_status() == "WAIT"

    assert run.create_eval(3) == 3
    assert run.create_eval(3) == 0

    assert [task.task_id - EVAL_BASE for task in run.lease()] == [0, 1, 2]


def test_evaluation_waits_for_its_version(run: RunInStore) -> None:
    run.create_eval(2, step=3)

    assert run.lease(step=2) == []
    assert run.lease_status(version=(run.lineage - 1, 9)) == "EMPTY"
    assert len(run.lease(step=3)) == 2


def test_results_are_kept_apart_from_training(run: RunInStore) -> None:
    run.create(1)
    run.create_eval(4, step=0)
    tasks = run.lease(4)
    run.beat(tasks[2], 0, 2)
    assert run.submit(tasks[:2]) == ["OK", "OK"]
    assert run.submit(tasks[:2]) == ["DUP", "DUP"]

    stats = run.stats()
    assert (stats.created, stats.ready, stats.buffered) == (GROUP_SIZE, GROUP_SIZE, 0)
    assert (stats.eval.ready, stats.eval.leased, stats.eval.done) == (0, 2, 2)
    asked = [task.task_id for task in tasks]
    so_far = run.store.run(operations.eval_round(run.lineage, 0, asked))
    records = {task.task_id: f"record {task.task_id}".encode() for task in tasks[:2]}
    assert so_far == (2, 0, 2, records)

    assert run.store.run(operations.close_eval(run.lineage, 0)) == 2
    assert run.submit(tasks[2:]) == ["GONE", "GONE"]
    assert run.store.run(operations.eval_round(run.lineage, 0, asked)).records == records
    assert run.redis.ttl(f"{run.prefix}:v:{run.lineage}:0") > 0
    assert not run.redis.keys(f"*:t:{EVAL_BASE // 10**9}*")


def test_an_expired_evaluation_task_is_continued_and_a_hopeless_one_fails(run: RunInStore) -> None:
    run.create_eval(1)
    task = run.lease()[0]
    run.beat(task, 0, 5)
    assert run.expire([task]) == [task.task_id]
    task = run.lease()[0]
    assert task.length == 5

    assert run.expire([task], max_attempts=1) == [task.task_id]

    result = run.store.run(operations.eval_round(run.lineage, 0))
    assert result == (0, 1, 0, {})
    assert run.stats().dead == 0


def test_a_new_learner_ends_the_evaluations_of_the_last(run: RunInStore) -> None:
    run.create_eval(2)
    task = run.lease(1)[0]

    run.store.run(operations.begin_lineage(run.lineage, 0))

    assert run.submit([task]) == ["GONE"]
    assert run.lease_status(version=(run.lineage + 1, 0)) == "EMPTY"


def test_evaluation_ids_have_a_space_of_their_own(run: RunInStore) -> None:
    with pytest.raises(RecordError, match="evaluation ids"):
        operations.create(run.lineage, [NewTask(5, 5, b"", 0)])
    with pytest.raises(RecordError, match="training ids"):
        operations.create(run.lineage, [NewTask(EVAL_BASE, EVAL_BASE, b"")])
