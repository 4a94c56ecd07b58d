"""A batch is claimed: what is listed, what replaces a dropped unit, and what the seal holds."""

from __future__ import annotations

import pytest

from buffer import operations
from buffer.operations.operation import SLICE
from configs.errors import RecordError, StoreError
from tests.buffer.support.run_in_store import (
    GROUP_SIZE,
    RunInStore,
)


def test_a_claim_is_sticky_and_takes_the_oldest_first(run: RunInStore) -> None:
    run.create(4)
    tasks = run.lease()
    run.submit(tasks[8:12])
    run.submit(tasks[:4])
    run.submit(tasks[4:8])

    first = run.store.run(operations.claim(run.lineage, 1, 2, start=True))
    assert [unit.group_id for unit in first.units] == [2, 0]
    assert (first.complete, first.sealed, first.starts) == (True, False, 1)
    assert run.claimed(2) == [1]
    assert not run.store.run(operations.claim(run.lineage, 2, 2)).complete

    again = run.store.run(operations.claim(run.lineage, 1, 2, start=True))
    assert again == first._replace(starts=2)


def test_only_units_that_the_learner_does_not_know_are_listed(run: RunInStore) -> None:
    run.fill(1)
    assert run.claimed(1, 3) == [0]
    assert run.claimed(1, 3, num_read=1) == []

    run.fill(1, first=1)
    assert run.claimed(1, 3, num_read=1) == [1]
    assert run.claimed(1, 3, num_read=1) == [0, 1]  # as after a lost reply
    assert run.claimed(1, 3, num_read=2) == []

    run.store.run(operations.drop(run.lineage, 1, [0], "stale"))
    assert run.claimed(1, 3, num_read=2) == [1]
    assert run.claimed(1, 3, num_read=1) == []
    run.fill(1, first=2)
    assert run.claimed(1, 3, num_read=1) == [2]
    assert run.claimed(1, 3) == [1, 2]


def test_a_batch_in_order_waits_for_its_own_units_and_holds_them_by_number(run: RunInStore) -> None:
    def batch(k: int, *, num_read: int = 0) -> tuple[bool, list[int]]:
        call = operations.claim(run.lineage, k, 2, num_read=num_read, in_order=True)
        claim = run.store.run(call)
        return claim.complete, [unit.group_id for unit in claim.units]

    run.create(4)
    by_unit = [run.lease(GROUP_SIZE) for _ in range(4)]
    for unit in (3, 1):
        run.submit(by_unit[unit])
    assert batch(1) == (False, [1])  # 3 is as old, and of the batch after

    run.submit(by_unit[2])
    assert batch(1, num_read=1) == (False, [])
    run.submit(by_unit[0])
    assert batch(1, num_read=1) == (True, [0, 1])
    run.store.run(operations.seal(run.lineage, 1))
    assert batch(1) == (True, [0, 1])
    assert batch(2) == (True, [2, 3])


def test_a_life_that_begins_is_counted_though_nothing_came(run: RunInStore) -> None:
    run.fill(1)
    run.claimed(1)

    claim = run.store.run(operations.claim(run.lineage, 1, 2, start=True, num_read=1))

    assert (claim.complete, claim.sealed, claim.starts, claim.units) == (False, False, 1, [])


def test_a_full_batch_is_listed_whatever_the_learner_knows(run: RunInStore) -> None:
    run.fill(2)

    for num_read in (0, 1, 2):
        assert run.claimed(1, num_read=num_read) == [0, 1]
    run.store.run(operations.seal(run.lineage, 1))
    for num_read in (0, 1, 2):
        assert run.claimed(1, 4, num_read=num_read) == [0, 1]


def test_what_comes_in_several_slices_is_listed(run: RunInStore) -> None:
    slice_units = SLICE // GROUP_SIZE
    run.redis.hset(run.prefix + ":meta", "units_per_batch", 2 * slice_units)
    run.fill(1)
    assert run.claimed(1, 2 * slice_units) == [0]

    run.fill(slice_units, first=1)

    assert run.claimed(1, 2 * slice_units, num_read=1) == list(range(1 + slice_units))


def test_a_sealed_claim_is_the_same_for_the_next_learner(run: RunInStore) -> None:
    run.fill(4)
    run.train(1)
    before = run.store.run(operations.claim(run.lineage, 1, 2))
    lineage = run.store.run(operations.begin_lineage(run.lineage, 0))
    assert lineage is not None

    assert run.store.run(operations.claim(lineage, 1, 4)) == before


def test_dropped_units_are_replaced_until_the_seal(run: RunInStore) -> None:
    run.fill(4)
    run.claimed(1)

    assert run.store.run(operations.drop(run.lineage, 1, [0, 77], "zero_variance")) == GROUP_SIZE
    assert run.claimed(1) == [1, 2]
    assert run.store.run(operations.drop(run.lineage, 1, [0], "zero_variance")) == 0
    run.store.run(operations.seal(run.lineage, 1))

    for reason in ("stale", "poison"):
        with pytest.raises(StoreError, match="dropped before their batch is sealed"):
            run.store.run(operations.drop(run.lineage, 1, [1], reason))
    with pytest.raises(RecordError, match="reason must be"):
        operations.drop(run.lineage, 1, [1], "Too old!")
    assert run.stats().dropped == {"zero_variance": GROUP_SIZE}
    assert run.store.run(operations.records([0, 4])) == [None, b"record 4"]


def test_a_batch_given_up_is_filled_with_other_units(run: RunInStore) -> None:
    run.fill(4)
    run.claimed(1)
    run.store.run(operations.seal(run.lineage, 1))

    assert run.store.run(operations.abandon(run.lineage, 1, "poison")) == 2 * GROUP_SIZE

    claim = run.store.run(operations.claim(run.lineage, 1, 2, start=True))
    assert [unit.group_id for unit in claim.units] == [2, 3]
    assert (claim.sealed, claim.starts) == (False, 1)
    assert run.stats().dropped == {"poison": 2 * GROUP_SIZE}
    assert run.stats().dead == 0
    run.train(1)
    with pytest.raises(StoreError, match="later than the trained ones, got one <= 1"):
        run.store.run(operations.abandon(run.lineage, 1, "poison"))


def test_claims_are_closed_while_the_run_is_paused(run: RunInStore) -> None:
    run.fill(2)
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
