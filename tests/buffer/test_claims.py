"""The learner's operations: lineages, admission, claims, commits, the end of a run."""

from __future__ import annotations

import pytest

from buffer import operations
from buffer.operations.operation import SLICE, Call, Operation, Steps, repeated
from buffer.operations.values import NewTask
from configs.errors import LostLineage, RecordError, SettingsError, StoreError
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


def _fill(run: RunInStore, units: int, *, first: int = 0, step: int = 0) -> None:
    run.create(units, first=first)
    tasks = run.lease(units * GROUP_SIZE, step=step)
    assert len(tasks) == units * GROUP_SIZE
    run.submit(tasks)


def _units(run: RunInStore, k: int, units: int = UNITS_PER_BATCH, *, known: int = 0) -> list[int]:
    claim = run.store.run(operations.claim(run.lineage, k, units, known=known))
    return [unit.group_id for unit in claim.units]


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
        operations.show(lineage, b"{}"),
    ]


def test_every_write_of_an_older_learner_is_refused(run: RunInStore) -> None:
    _fill(run, 2)
    run.store.run(operations.begin_lineage(run.lineage, 0))
    before = run.redis.keys("*"), run.stats()

    for operation in _learner_operations(run.lineage):
        with pytest.raises(LostLineage, match=f"{operation.name}: .* lineage 2"):
            run.store.run(operation)

    assert sorted(run.redis.keys("*")) == sorted(before[0])
    assert run.stats() == before[1]


def test_a_learner_ahead_of_the_store_hears_of_lost_writes(run: RunInStore) -> None:
    with pytest.raises(StoreError, match="lost writes"):
        run.store.run(operations.advance(run.lineage + 1, 1))


def test_admission_counts_open_buffered_and_training_units(run: RunInStore) -> None:
    run.create(12)
    cap = (MAX_POLICY_LAG + 1) * UNITS_PER_BATCH
    tasks = run.lease()
    assert len(tasks) == cap * GROUP_SIZE

    run.submit(tasks)
    assert run.lease_status() == "WAIT"  # buffered units count

    _units(run, 1)
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


def test_a_claim_is_sticky_and_takes_the_oldest_first(run: RunInStore) -> None:
    run.create(4)
    tasks = run.lease()
    run.submit(tasks[8:12])
    run.submit(tasks[:4])
    run.submit(tasks[4:8])

    first = run.store.run(operations.claim(run.lineage, 1, 2, start=True))
    assert [unit.group_id for unit in first.units] == [2, 0]
    assert (first.complete, first.sealed, first.starts) == (True, False, 1)
    assert _units(run, 2) == [1]
    assert not run.store.run(operations.claim(run.lineage, 2, 2)).complete

    again = run.store.run(operations.claim(run.lineage, 1, 2, start=True))
    assert again == first._replace(starts=2)


def test_only_units_that_the_learner_does_not_know_are_listed(run: RunInStore) -> None:
    _fill(run, 1)
    assert _units(run, 1, 3) == [0]
    assert _units(run, 1, 3, known=1) == []

    _fill(run, 1, first=1)
    assert _units(run, 1, 3, known=1) == [1]
    assert _units(run, 1, 3, known=1) == [0, 1]  # as after a lost reply
    assert _units(run, 1, 3, known=2) == []

    run.store.run(operations.drop(run.lineage, 1, [0], "stale"))
    assert _units(run, 1, 3, known=2) == [1]
    assert _units(run, 1, 3, known=1) == []
    _fill(run, 1, first=2)
    assert _units(run, 1, 3, known=1) == [2]
    assert _units(run, 1, 3) == [1, 2]


def test_a_batch_in_order_waits_for_its_own_units_and_holds_them_by_number(run: RunInStore) -> None:
    def batch(k: int, *, known: int = 0) -> tuple[bool, list[int]]:
        call = operations.claim(run.lineage, k, 2, known=known, in_order=True)
        claim = run.store.run(call)
        return claim.complete, [unit.group_id for unit in claim.units]

    run.create(4)
    by_unit = [run.lease(GROUP_SIZE) for _ in range(4)]
    for unit in (3, 1):
        run.submit(by_unit[unit])
    assert batch(1) == (False, [1])  # 3 is as old, and of the batch after

    run.submit(by_unit[2])
    assert batch(1, known=1) == (False, [])
    run.submit(by_unit[0])
    assert batch(1, known=1) == (True, [0, 1])
    run.store.run(operations.seal(run.lineage, 1))
    assert batch(1) == (True, [0, 1])
    assert batch(2) == (True, [2, 3])


def test_a_life_that_begins_is_counted_though_nothing_came(run: RunInStore) -> None:
    _fill(run, 1)
    _units(run, 1)

    claim = run.store.run(operations.claim(run.lineage, 1, 2, start=True, known=1))

    assert (claim.complete, claim.sealed, claim.starts, claim.units) == (False, False, 1, [])


def test_a_full_batch_is_listed_whatever_the_learner_knows(run: RunInStore) -> None:
    _fill(run, 2)

    for known in (0, 1, 2):
        assert _units(run, 1, known=known) == [0, 1]
    run.store.run(operations.seal(run.lineage, 1))
    for known in (0, 1, 2):
        assert _units(run, 1, 4, known=known) == [0, 1]


def test_what_comes_in_several_slices_is_listed(run: RunInStore) -> None:
    slice_units = SLICE // GROUP_SIZE
    run.redis.hset(run.prefix + ":meta", "units_per_batch", 2 * slice_units)
    _fill(run, 1)
    assert _units(run, 1, 2 * slice_units) == [0]

    _fill(run, slice_units, first=1)

    assert _units(run, 1, 2 * slice_units, known=1) == list(range(1 + slice_units))


def test_a_sealed_claim_is_the_same_for_the_next_learner(run: RunInStore) -> None:
    _fill(run, 4)
    run.train(1)
    before = run.store.run(operations.claim(run.lineage, 1, 2))
    lineage = run.store.run(operations.begin_lineage(run.lineage, 0))
    assert lineage is not None

    assert run.store.run(operations.claim(lineage, 1, 4)) == before


def test_dropped_units_are_replaced_until_the_seal(run: RunInStore) -> None:
    _fill(run, 4)
    _units(run, 1)

    assert run.store.run(operations.drop(run.lineage, 1, [0, 77], "zero_variance")) == GROUP_SIZE
    assert _units(run, 1) == [1, 2]
    assert run.store.run(operations.drop(run.lineage, 1, [0], "zero_variance")) == 0
    run.store.run(operations.seal(run.lineage, 1))

    for reason in ("stale", "poison"):
        with pytest.raises(StoreError, match="dropped only before a batch is sealed"):
            run.store.run(operations.drop(run.lineage, 1, [1], reason))
    with pytest.raises(RecordError, match="reason must be"):
        operations.drop(run.lineage, 1, [1], "Too old!")
    assert run.stats().dropped == {"zero_variance": GROUP_SIZE}
    assert run.store.run(operations.records([0, 4])) == [None, b"record 4"]


def test_a_batch_given_up_is_filled_with_other_units(run: RunInStore) -> None:
    _fill(run, 4)
    _units(run, 1)
    run.store.run(operations.seal(run.lineage, 1))

    assert run.store.run(operations.abandon(run.lineage, 1, "poison")) == 2 * GROUP_SIZE

    claim = run.store.run(operations.claim(run.lineage, 1, 2, start=True))
    assert [unit.group_id for unit in claim.units] == [2, 3]
    assert (claim.sealed, claim.starts) == (False, 1)
    assert run.stats().dropped == {"poison": 2 * GROUP_SIZE}
    assert run.stats().dead == 0
    run.train(1)
    with pytest.raises(StoreError, match="must not be trained yet"):
        run.store.run(operations.abandon(run.lineage, 1, "poison"))


def test_the_end_reaches_a_finished_unit_with_the_last_place_of_a_call(
    run: RunInStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(run, 1)
    run.create(1, first=1)
    monkeypatch.setattr("buffer.operations.tasks.SLICE", 2 * GROUP_SIZE)

    assert run.store.run(operations.cancel(run.lineage)) == 2 * GROUP_SIZE

    assert (run.stats().new_units, run.stats().buffered_units) == (0, 0)


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
    _fill(run, 4)
    for k in (1, 2):
        run.train(k, 2)

    def one_call() -> Steps[object]:
        return (yield Call("commit", (run.lineage, 2, GROUP_SIZE)))

    moved = [run.store.run(Operation("commit", one_call)) for _ in range(4)]

    assert moved == [[GROUP_SIZE, 1]] * 3 + [[GROUP_SIZE, 0]]


def test_a_call_ends_no_more_than_it_was_asked_to_of_all_kinds(run: RunInStore) -> None:
    _fill(run, 2)
    run.create(1, first=2)

    def one_call() -> Steps[object]:
        return (yield Call("cancel", (run.lineage, GROUP_SIZE)))

    ended = [run.store.run(Operation("cancel", one_call)) for _ in range(4)]

    assert ended == [[GROUP_SIZE, 1]] * 3 + [[0, 0]]


def test_claims_are_closed_while_the_run_is_paused(run: RunInStore) -> None:
    _fill(run, 2)
    run.train(1)
    run.redis.hset(run.prefix + ":meta", "state", "PAUSED")

    claim = run.store.run(operations.claim(run.lineage, 1, 2, start=True))

    assert (claim.complete, claim.units, claim.starts) == (False, [], 0)


def test_submit_and_beat_stay_open_while_the_run_is_recovering(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    run.redis.hset(run.prefix + ":meta", "state", "RECOVERING")

    assert run.beat(tasks[0], 0, 1) == ("OK", 1)
    assert run.submit(tasks) == ["OK"] * GROUP_SIZE


def test_a_commit_leaves_one_bit_per_task(run: RunInStore) -> None:
    _fill(run, 2)
    keys = len(run.redis.keys("*"))
    run.train(1)

    assert run.store.run(operations.commit(run.lineage, 1)) == 2 * GROUP_SIZE
    assert run.store.run(operations.commit(run.lineage, 1)) == 0

    assert len(run.redis.keys("*")) < keys - 2 * GROUP_SIZE
    assert not run.redis.keys("*:t:*")
    stats = run.stats()
    assert (stats.committed, stats.committed_step, stats.claimed) == (2 * GROUP_SIZE, 1, 0)
    assert run.create(2) == 0  # known for ever
    with pytest.raises(StoreError, match="newer than the last committed"):
        run.store.run(operations.claim(run.lineage, 1, 2))


def test_a_commit_of_many_tasks_works_in_slices(run: RunInStore) -> None:
    units = 300
    run.redis.hset(run.prefix + ":meta", "units_per_batch", units)
    _fill(run, units)

    run.train(1, units)

    assert run.store.run(operations.commit(run.lineage, 1)) == units * GROUP_SIZE
    assert run.stats().claims == ()


def test_only_trained_and_sealed_batches_are_committed(run: RunInStore) -> None:
    _fill(run, 2)
    _units(run, 1)
    with pytest.raises(StoreError, match="must be trained, got one > 0"):
        run.store.run(operations.commit(run.lineage, 1))
    run.store.run(operations.advance(run.lineage, 1))
    with pytest.raises(StoreError, match="batch 1 is not sealed"):
        run.store.run(operations.commit(run.lineage, 1))
    with pytest.raises(StoreError, match="got none in batch 2"):
        run.store.run(operations.seal(run.lineage, 2))
    with pytest.raises(StoreError, match="must not decrease"):
        run.store.run(operations.advance(run.lineage, 0))


def test_the_end_of_a_run_cancels_what_is_not_trained(run: RunInStore) -> None:
    run.create(12)
    run.create_eval(3, step=1)
    tasks = run.lease(12 * GROUP_SIZE)
    run.submit(tasks[: 8 * GROUP_SIZE])
    run.train(1)
    _units(run, 2)
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
    _fill(run, buffered)
    run.create(leased, first=buffered)
    run.lease(leased * GROUP_SIZE)
    run.create(new, first=buffered + leased)

    cancelled = run.store.run(repeated("cancel", (run.lineage, 2 * GROUP_SIZE)))

    assert cancelled == 3 * GROUP_SIZE
    assert not run.redis.keys("*:t:*")


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
