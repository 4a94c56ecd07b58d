"""A run begins once, and one learner writes to it: each take-over is a lineage of its own."""

from __future__ import annotations

import pytest

from buffer import operations
from buffer.operations.operation import Operation
from buffer.operations.values import NewTask
from configs.errors import LostLineage, SettingsError, StoreError
from tests.buffer.support.run_in_store import (
    GROUP_SIZE,
    MAX_POLICY_LAG,
    UNITS_PER_BATCH,
    RunInStore,
)


def _begin(
    run: RunInStore,
    *,
    config: str = "c0",
    environment: str = "e0",
    margin: float = 1,
    vocabulary: int | None = None,
) -> None:
    run.store.run(
        operations.begin_run(
            config,
            {"environment": environment},
            units_per_batch=UNITS_PER_BATCH,
            max_policy_lag=MAX_POLICY_LAG,
            margin=margin,
            group_size=GROUP_SIZE,
            min_group_size=2,
            vocabulary=vocabulary,
        )
    )


def test_a_run_begins_once_and_keeps_its_settings(run: RunInStore) -> None:
    _begin(run)
    with pytest.raises(SettingsError, match="environment must be what the run began with, 'e0'"):
        _begin(run, environment="e1")
    with pytest.raises(SettingsError, match=r"margin must be .* '1.0', got '2.0'"):
        _begin(run, margin=2)
    with pytest.raises(SettingsError, match="config_hash"):
        _begin(run, config="c1")
    assert run.stats().lineage == run.lineage
    run.redis.hdel(f"{run.prefix}:meta", "layout")  # as releases before this one left it
    with pytest.raises(SettingsError, match=r"layout must be .* '', got '2'; .* begin a new run"):
        _begin(run)


def test_a_run_that_knew_no_vocabulary_learns_it_once(run: RunInStore) -> None:
    _begin(run)
    _begin(run, vocabulary=17)
    with pytest.raises(SettingsError, match=r"vocabulary must be .* '17', got '18'"):
        _begin(run, vocabulary=18)


def test_a_lineage_is_taken_by_one_learner_only(run: RunInStore) -> None:
    assert run.store.run(operations.begin_lineage(run.lineage, 3)) == run.lineage + 1
    assert run.store.run(operations.begin_lineage(run.lineage, 3)) is None
    assert run.store.run(operations.lineages()) == {1: 0, 2: 3}
    assert run.stats().version == 3


def test_a_take_over_sent_again_finds_its_own_lineage(run: RunInStore) -> None:
    take_over = operations.begin_lineage(run.lineage, 3)
    lineage = run.store.run(take_over)
    assert lineage == run.lineage + 1

    assert run.store.run(take_over) == lineage  # as after a lost reply
    assert run.store.run(operations.lineages()) == {1: 0, 2: 3}

    assert run.store.run(operations.begin_lineage(lineage, 3)) == lineage + 1
    assert run.store.run(take_over) is None  # by now it is another learner's


def _learner_operations(lineage: int) -> list[Operation[object]]:
    task = NewTask(400, 100, b"")
    group = [task._replace(task_id=400 + i) for i in range(GROUP_SIZE)]
    return [
        operations.create(lineage, group),
        operations.create(lineage, [NewTask(2**48, 0, b"", 0)]),
        operations.claim(lineage, 1, 1),
        operations.drop(lineage, 1, [0], "stale"),
        operations.abandon(lineage, 1, "poison"),
        operations.seal(lineage, 1),
        operations.advance(lineage, 1),
        operations.commit(lineage, 0),
        operations.cancel(lineage),
        operations.publish(lineage, 0, {"digest": "d"}),
        operations.close_eval(lineage, 0),
        operations.write_run_snapshot(lineage, b"{}"),
    ]


def test_every_write_of_an_older_learner_is_refused(run: RunInStore) -> None:
    run.fill(2)
    run.store.run(operations.begin_lineage(run.lineage, 0))
    before = run.redis.keys("*"), run.stats()

    for operation in _learner_operations(run.lineage):
        with pytest.raises(LostLineage, match=f"{operation.name}: .* lineage 2"):
            run.store.run(operation)

    assert sorted(run.redis.keys("*")) == sorted(before[0])
    assert run.stats() == before[1]


def test_a_learner_ahead_of_the_store_hears_of_lost_writes(run: RunInStore) -> None:
    with pytest.raises(StoreError, match="at least the learner's, got 1"):
        run.store.run(operations.advance(run.lineage + 1, 1))


def test_a_new_learner_reopens_an_ended_run(run: RunInStore) -> None:
    run.create(1)
    run.store.run(operations.cancel(run.lineage))

    run.lineage = run.store.run(operations.begin_lineage(run.lineage, 0)) or 0

    assert run.create(1) == 0
    assert run.create(1, first=1) == GROUP_SIZE
    assert run.lease_status() == "OK"


def test_publications_only_move_forward(run: RunInStore) -> None:
    assert run.store.run(operations.publication()) is None
    publish = operations.publish
    run.store.run(publish(run.lineage, 2, {"digest": "d2", "endpoint": "tcp://a:1"}))
    run.store.run(publish(run.lineage, 2, {"digest": "d2", "endpoint": "tcp://a:2"}))

    with pytest.raises(StoreError, match="must not decrease"):
        run.store.run(publish(run.lineage, 1, {"digest": "d1"}))
    with pytest.raises(StoreError, match="keep its digest"):
        run.store.run(publish(run.lineage, 2, {"digest": "other"}))

    publication = run.store.run(operations.publication())
    assert publication is not None
    assert publication.version == (run.lineage, 2)
    assert publication.fields == {"digest": "d2", "endpoint": "tcp://a:2"}
