"""What a run has in Redis: exact while it is little, estimated by the mean when there is more."""

from __future__ import annotations

from buffer import operations
from buffer.operations.operation import single
from tests.buffer.support.run_in_store import RunInStore


def test_records_and_chunks_count_until_they_are_committed(run: RunInStore) -> None:
    run.create(4)
    assert run.store.run(operations.usage()) == 0
    tasks = run.lease()
    run.beat(tasks[0], num_tokens=4)
    chunk = len("0,1,2,3,")
    assert run.store.run(operations.usage()) == chunk

    whole = run.submit(tasks)
    records = sum(len(f"record {task.task_id}") for task in tasks)
    assert whole == ["OK"] * len(tasks)
    assert run.store.run(operations.usage()) == records
    assert run.store.run(operations.memory(of_run=True)).run_bytes == records
    assert run.store.run(operations.memory()).run_bytes == 0

    run.train(1)
    assert run.store.run(operations.usage()) == records
    run.store.run(operations.commit(run.lineage, 1))
    assert run.store.run(operations.usage()) < records


def test_of_many_tasks_a_few_are_looked_at_and_the_others_count_as_their_mean(
    run: RunInStore,
) -> None:
    run.create(2)
    run.submit(run.lease())
    exact = run.store.run(operations.usage())

    assert run.store.run(single("usage", (3,), int)) == exact  # all records are equally long
