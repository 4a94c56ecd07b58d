"""Units that are trained again: kept at COMMIT, drawn, given back, forgotten."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from buffer import operations
from buffer.operations.values import Rating, ReusedUnit
from buffer.store import Store
from configs.errors import LostLineage, StoreError
from tests.buffer.support.run_in_store import GROUP_SIZE, UNITS_PER_BATCH, RunInStore


def keep(run: RunInStore, k: int, *, uses: int = 2, born: int = 0, rank: float = 0.0) -> None:
    """Train and commit batch k of new units, which are kept."""
    run.create(UNITS_PER_BATCH, first=(k - 1) * UNITS_PER_BATCH)
    run.submit(run.lease(step=k - 1))
    claim = run.store.run(operations.claim(run.lineage, k, UNITS_PER_BATCH))
    ratings = [Rating(unit.group_id, uses, born, rank + unit.group_id) for unit in claim.units]
    run.store.run(operations.seal(run.lineage, k, ratings))
    run.store.run(operations.advance(run.lineage, k))
    run.store.run(operations.commit(run.lineage, k))


def draw(
    run: RunInStore, k: int, units: int, *, sampling: str = "newest", seed: int = 0
) -> list[ReusedUnit]:
    """Draw kept units for batch k."""
    rng = random.Random(seed)
    numbers = [rng.random() for _ in range(units)]
    call = operations.reuse(run.lineage, k, units, sampling=sampling, numbers=numbers)
    return run.store.run(call)


def groups(units: list[ReusedUnit]) -> list[int]:
    """Name the units."""
    return sorted(unit.group_id for unit in units)


def train_again(run: RunInStore, k: int) -> None:
    """Train and commit batch k of what it reuses and of units that are not kept."""
    run.create(UNITS_PER_BATCH, first=(k - 1) * UNITS_PER_BATCH)
    run.submit(run.lease(step=k - 1))
    run.train(k)
    run.store.run(operations.commit(run.lineage, k))


def trim(
    run: RunInStore, *, units: int = 99, num_bytes: int = 10**9, born: int = 0, share: float = 1.0
) -> int:
    """Forget what is out of bounds."""
    call = operations.trim_replay(
        run.lineage, units=units, num_bytes=num_bytes, born=born, memory_share=share
    )
    return run.store.run(call)


def test_a_kept_unit_is_committed_and_can_be_read_again(run: RunInStore) -> None:
    keep(run, 1)

    (unit,) = draw(run, 2, 1)

    assert (unit.group_id, unit.uses, unit.task_ids) == (0, 0, (0, 1, 2, 3))
    records = run.store.run(operations.records(unit.task_ids))
    assert records == [b"record 0", b"record 1", b"record 2", b"record 3"]
    stats = run.stats()
    assert stats.committed == stats.created == 2 * GROUP_SIZE
    assert (stats.kept_units, stats.reused_units, stats.kept_bytes) == (1, 1, 64)


def test_a_unit_without_a_rating_is_not_kept(run: RunInStore) -> None:
    train_again(run, 1)

    assert draw(run, 2, 5) == []
    assert run.store.run(operations.records([0])) == [None]


def test_a_batch_keeps_what_it_drew(run: RunInStore) -> None:
    keep(run, 1)

    first = draw(run, 2, 1)

    assert draw(run, 2, 1, seed=1) == first
    assert groups(draw(run, 2, 2)) == [0, 1]
    assert draw(run, 3, 5) == []


def test_a_sealed_batch_gets_no_more(run: RunInStore) -> None:
    keep(run, 1)
    run.create(UNITS_PER_BATCH, first=UNITS_PER_BATCH)
    run.submit(run.lease(step=1))
    drawn = draw(run, 2, 1)
    run.train(2)

    assert draw(run, 2, 2) == drawn
    with pytest.raises(StoreError, match="sealed"):
        run.store.run(operations.forget_reused(run.lineage, 2, groups(drawn)))


def test_a_unit_is_used_so_often_and_then_gone(run: RunInStore) -> None:
    keep(run, 1, uses=2)

    for k, uses in ((2, 0), (3, 1)):
        assert [unit.uses for unit in draw(run, k, 2)] == [uses, uses]
        train_again(run, k)
        run.store.run(operations.commit(run.lineage, k))

    assert draw(run, 4, 2) == []
    assert run.store.run(operations.records([0])) == [None]
    assert run.stats().kept_bytes == 0


def test_committed_is_who_used_a_unit_even_if_the_reply_is_lost(run: RunInStore) -> None:
    keep(run, 1, uses=2)
    draw(run, 2, 2)
    train_again(run, 2)
    train_again(run, 3)

    assert [unit.uses for unit in draw(run, 4, 2)] == [1, 1]


def test_an_abandoned_batch_gives_back_what_it_drew_and_a_poisonous_one_does_not(
    run: RunInStore,
) -> None:
    keep(run, 1)
    for to_dead_letters, left in ((False, [0, 1]), (True, [])):
        draw(run, 2, 2)
        run.store.run(operations.abandon(run.lineage, 2, "poison", to_dead_letters=to_dead_letters))

        assert groups(draw(run, 3, 2)) == left
        run.store.run(operations.abandon(run.lineage, 3, "other"))


def test_a_unit_that_must_not_be_trained_is_forgotten(run: RunInStore) -> None:
    keep(run, 1)
    draw(run, 2, 2)

    assert run.store.run(operations.forget_reused(run.lineage, 2, [0, 7])) == 1
    assert run.store.run(operations.forget_reused(run.lineage, 3, [1])) == 0

    assert groups(draw(run, 2, 0)) == [1]
    assert run.store.run(operations.records([0])) == [None]


def test_newest_takes_the_lowest_rank(run: RunInStore) -> None:
    keep(run, 1, rank=10)
    keep(run, 2, rank=0)

    assert groups(draw(run, 3, 2)) == [2, 3]


def test_uniform_draws_every_unit_alike_and_prioritised_the_first_more_often(
    run: RunInStore,
) -> None:
    for k in range(1, 5):
        keep(run, k)
    times = {"uniform": Counter[int](), "prioritised": Counter[int]()}

    for sampling, count in times.items():
        for seed in range(600):
            count[draw(run, 5, 1, sampling=sampling, seed=seed)[0].group_id] += 1
            run.store.run(operations.abandon(run.lineage, 5, "other"))

    assert set(times["uniform"]) == set(range(8))
    # 75 expected, five deviations are 41; P(rank 0) = log 2 / log 9 = 0.315, P(rank 7) = 0.054.
    assert all(34 <= times["uniform"][unit] <= 116 for unit in range(8))
    assert 132 <= times["prioritised"][0] <= 246
    assert 5 <= times["prioritised"][7] <= 60


def test_the_oldest_go_when_there_are_too_many_or_too_large_or_too_old(run: RunInStore) -> None:
    for k in range(1, 5):
        keep(run, k, born=k)
    assert trim(run) == 0

    assert trim(run, born=2) == 2
    assert trim(run, units=5) == 1
    assert trim(run, num_bytes=3 * 36) == 2
    assert run.stats().kept_units == 3
    assert groups(draw(run, 5, 9)) == [5, 6, 7]


def test_a_full_redis_forgets_kept_units_but_none_of_a_batch(run: RunInStore) -> None:
    keep(run, 1)
    draw(run, 2, 1)

    assert trim(run, share=1e-6) == 1

    assert groups(draw(run, 2, 0)) == [0]
    assert run.store.run(operations.records([0])) == [b"record 0"]


def test_what_is_too_much_for_one_call_goes_in_several(
    run: RunInStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in (1, 2):
        keep(run, k)
    monkeypatch.setattr("buffer.operations.batches.UNITS_PER_CALL", 1)

    assert trim(run, units=2) == 2 * UNITS_PER_BATCH - 2
    assert run.store.run(operations.clear_replay(run.lineage)) == 2


def test_clearing_forgets_all(run: RunInStore) -> None:
    for k in range(1, 4):
        keep(run, k)
    draw(run, 4, 2)

    assert run.store.run(operations.clear_replay(run.lineage)) == 6

    assert not run.redis.keys(run.prefix + ":e:*") + run.redis.keys(run.prefix + ":x:*")
    assert run.stats().kept_bytes == 0


@pytest.mark.parametrize(
    ("checkpoint", "reused", "forgotten"),
    [
        (1, {2: [0]}, 0),
        (2, {}, 2),
        (0, {}, 0),
        (1, {2: [1]}, 2),
        (1, {2: [0, 1]}, 2),
        (1, {2: [0], 3: [1]}, 2),
        (1, {}, 0),
    ],
    ids=[
        "knows all",
        "commit lost",
        "commit is ahead",
        "other unit",
        "too few",
        "batch lost",
        "only being filled",
    ],
)
def test_after_a_rewind_kept_units_stay_only_if_every_use_is_known(
    run: RunInStore, checkpoint: int, reused: dict[int, list[int]], forgotten: int
) -> None:
    keep(run, 1)
    draw(run, 2, 1)

    assert run.store.run(operations.check_replay(run.lineage, checkpoint, reused)) == forgotten
    assert run.stats().kept_units + run.stats().reused_units == 2 - forgotten


def test_an_old_learner_cannot_touch_kept_units(run: RunInStore, store: Store) -> None:
    keep(run, 1)
    old = run.lineage
    new = store.run(operations.begin_lineage(old, 1))
    assert new is not None

    for call in (
        operations.reuse(old, 2, 1, sampling="newest", numbers=[0.5]),
        operations.forget_reused(old, 2, [0]),
        operations.trim_replay(old, units=0, num_bytes=0, born=9, memory_share=0.5),
        operations.clear_replay(old),
        operations.check_replay(old, 0, {}),
    ):
        with pytest.raises(LostLineage):
            store.run(call)
    run.lineage = new
    assert groups(draw(run, 2, 2)) == [0, 1]
