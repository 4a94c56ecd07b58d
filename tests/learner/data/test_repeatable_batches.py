"""Batches of a run that is to be the same each time: their own groups, or the run ends."""

from __future__ import annotations

from itertools import count

import pytest

from broker.protocol.codec import encode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.operations.values import NewTask
from configs.errors import DeterminismError
from tests.learner.support.claims_bench import Bench


def test_a_repeatable_batch_has_its_own_groups_whatever_came_first(bench: Bench) -> None:
    bench.be_repeatable()
    claims = bench.claims()
    for group in (2, 1):
        bench.fill(1, first=group)
    assert claims.poll(1) is None

    bench.fill(1)
    batch = claims.poll(1)

    assert batch is not None
    assert [episode.task_id for episode in batch.episodes] == list(range(8))


def test_a_repeatable_run_ends_where_a_group_lacks_a_member(bench: Bench) -> None:
    bench.be_repeatable()
    claims = bench.claims()
    bench.fill(1)
    ids = range(4, 8)
    spec = encode_spec(TaskSpec(1, 1, 0, "train", 1.0))
    bench.store.run(operations.create(bench.lineage, [NewTask(i, 1, spec) for i in ids]))
    lease = operations.lease("actor", ttl_ms=60_000, n=1, version=(bench.lineage, 0))
    (task,) = bench.store.run(lease).tasks
    failures = [(task.task_id, task.fence, "data", "no such file")]
    bench.store.run(operations.fail(max_attempts=1, max_data_failures=1, failures=failures))
    bench.answer(3)

    with pytest.raises(
        DeterminismError, match=r"must be in its own batch with .*, got 1 dead at batch 1; fix"
    ):
        claims.poll(1)


def test_a_repeatable_run_ends_while_it_waits_for_groups_that_are_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.data.claims.REPORT_EVERY_S", 0.0)
    bench.be_repeatable()
    claims = bench.claims()
    bench.fill(1)
    assert claims.poll(1) is None
    bench.store.run(operations.abandon(bench.lineage, 1, "forgotten"))
    looks = count()

    with pytest.raises(DeterminismError, match="got 4 forgotten at batch 1; fix"):
        claims.wait(1, until=lambda: next(looks) > 20)


def test_a_repeatable_run_does_not_go_on_from_before_its_last_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.data.claims.REPORT_EVERY_S", 0.0)
    bench.be_repeatable()
    claims = bench.claims()
    for step in (1, 2):
        bench.fill(2, first=2 * step - 2, version=(bench.lineage, step - 1))
        assert claims.poll(step) is not None
        bench.store.run(operations.advance(bench.lineage, step))
    bench.store.run(operations.commit(bench.lineage, 2))

    claims = bench.restart(1)
    looks = count()

    with pytest.raises(DeterminismError, match="got 8 trained already at batch 2; fix"):
        claims.wait(2, until=lambda: next(looks) > 20)


def test_a_repeatable_run_ends_where_a_group_cannot_be_trained(bench: Bench) -> None:
    bench.be_repeatable()
    claims = bench.claims()
    bench.fill(1)
    bench.spoil(3)

    with pytest.raises(DeterminismError, match="got 4 unreadable at batch 1; fix"):
        claims.poll(1)
