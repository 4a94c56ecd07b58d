"""What a run has in Redis: exact while it is little, estimated by the mean when there is more."""

from __future__ import annotations

from collections.abc import Sized

import pytest

from buffer import operations
from buffer.operations.batches import BYTES_PER_REPLY, FIRST_RECORDS, RECORDS_PER_CALL
from buffer.operations.operation import Fetch, ScriptCall, single
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


@pytest.mark.parametrize(
    ("num_bytes", "most"), [(100, RECORDS_PER_CALL), (BYTES_PER_REPLY // 3, 3), (2**30, 1)]
)
def test_a_reply_holds_so_many_records_as_their_length_allows(num_bytes: int, most: int) -> None:
    asked: list[int] = []

    def ask(call: ScriptCall | Fetch) -> list[Sized]:
        assert isinstance(call, Fetch)
        asked.append(len(call.keys))
        return [range(num_bytes) for _ in call.keys]  # as long as a record, without its memory

    read = operations.records(list(range(200))).carry_out(ask)

    assert len(read) == sum(asked) == 200
    assert asked[0] == FIRST_RECORDS
    assert max(asked[1:]) == most
