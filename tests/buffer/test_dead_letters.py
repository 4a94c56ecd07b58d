"""Dead letters: what they keep, and what becomes of them when an operator decides."""

from __future__ import annotations

import pytest

from buffer import operations
from buffer.operations.values import LeasedTask
from tests.buffer.support import invariants
from tests.buffer.support.run_in_store import GROUP_SIZE, RunInStore


def _kill(run: RunInStore, tasks: list[LeasedTask], why: str = "reward raised KeyError") -> None:
    rows = [(task.task_id, task.fence, "data", why) for task in tasks]
    run.store.run(operations.fail(max_attempts=3, max_data_failures=1, failures=rows))


def _requeue(run: RunInStore, *tasks: int) -> list[str]:
    return run.store.run(operations.requeue_dead(tasks))


def _purge(run: RunInStore, *tasks: int) -> list[str]:
    return run.store.run(operations.purge_dead(tasks))


def _dead(run: RunInStore) -> list[int]:
    return [letter.task_id for letter in run.store.run(operations.dead_letters())]


def _check(run: RunInStore) -> invariants.Snapshot:
    run.stats()
    return invariants.check(run.redis, run.prefix, GROUP_SIZE)


def _poison(run: RunInStore, units: int = 2) -> None:
    """A sealed batch that killed its learners."""
    run.create(units + 2)
    run.submit(run.lease(units * GROUP_SIZE))
    run.store.run(operations.claim(run.lineage, 1, units))
    run.store.run(operations.seal(run.lineage, 1))
    run.store.run(operations.abandon(run.lineage, 1, "poison", to_dead_letters=True))


def test_a_dead_letter_says_why_and_keeps_what_was_made(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]
    run.beat(task, 0, 2)
    run.beat(task, 2, 3)
    _kill(run, [task])

    (letter,) = run.store.run(operations.dead_letters())
    assert letter.task_id == task.task_id
    assert (letter.why, letter.attempts, letter.length) == ("reward raised KeyError", 1, 5)
    assert letter.died_at_ms > 1_600_000_000_000
    dead = run.store.run(operations.dead_letter(task.task_id))
    assert dead is not None
    assert dead.letter == letter
    assert (dead.spec, dead.incarnation, dead.record) == (b"spec 0", "a", None)
    assert b"".join(dead.chunks) == b"0,1,2,3,4,"
    assert run.store.run(operations.dead_letter(1)) is None


def test_dead_letters_are_listed_in_pages_oldest_first(run: RunInStore) -> None:
    run.create(3)
    _kill(run, [task for task in run.lease() if task.task_id % GROUP_SIZE < 2])
    for i, task_id in enumerate((9, 8, 5, 4, 1, 0)):
        run.redis.zadd(run.prefix + ":dead", {str(task_id): i})

    pages = [run.store.run(operations.dead_letters(offset, 4)) for offset in (0, 4)]

    assert [[letter.task_id for letter in page] for page in pages] == [[9, 8, 5, 4], [1, 0]]


def test_a_poisonous_batch_keeps_its_records(run: RunInStore) -> None:
    _poison(run)

    stats = run.stats()
    assert (stats.dead, stats.dropped, stats.claimed) == (2 * GROUP_SIZE, {}, 0)
    dead = run.store.run(operations.dead_letter(5))
    assert dead is not None
    assert (dead.letter.why, dead.record) == ("poison", b"record 5")
    _check(run)


def test_a_requeued_member_of_an_open_unit_goes_on_from_its_tokens(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    run.beat(tasks[0], 0, 3)
    _kill(run, tasks[:1])

    assert _requeue(run, tasks[0].task_id) == ["READY"]

    _check(run)
    (again,) = run.lease()
    assert (again.task_id, again.length) == (tasks[0].task_id, 3)
    assert run.submit(tasks[:1]) == ["STALE"]
    run.submit([again, *tasks[1:]])
    claim = run.store.run(operations.claim(run.lineage, 1, 1))
    assert claim.units[0].task_ids == [0, 1, 2, 3]


def test_a_complete_unit_waits_again_for_its_requeued_member(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    run.submit(tasks[1:])
    _kill(run, tasks[:1])
    assert run.stats().buffered_units == 1

    assert _requeue(run, 0) == ["READY"]

    assert _check(run).units["open"] == {0}
    run.submit(run.lease(1))
    assert run.stats().buffered_units == 1


def test_a_unit_that_broke_begins_anew_with_all_its_members(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    run.beat(tasks[1], 0, 3)
    run.submit(tasks[:1])
    _kill(run, tasks[1:])
    assert (run.stats().dropped, run.stats().dead) == ({"group_broken": 1}, 3)

    assert _requeue(run, 2, 3) == ["ANEW", "GONE"]

    stats = run.stats()
    assert (stats.dropped, stats.dead, stats.ready) == ({"group_broken": 0}, 0, 4)
    _check(run)
    again = run.lease()
    assert [task.length for task in again] == [0] * GROUP_SIZE
    # A unit asks one question: the spec of the member that was dropped is that of another.
    assert [task.spec for task in again] == [b"spec 2", b"spec 1", b"spec 2", b"spec 3"]
    run.submit(again)
    assert run.stats().buffered_units == 1


def test_a_letter_whose_question_is_lost_asks_that_of_its_unit(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    run.submit(tasks[:1])
    _kill(run, tasks[1:])
    run.redis.hdel(f"{run.prefix}:t:2", "spec")

    assert _requeue(run, 2) == ["ANEW"]

    assert [task.spec for task in run.lease()] == [b"spec 1", b"spec 1", b"spec 1", b"spec 3"]


def test_a_poisonous_unit_begins_anew(run: RunInStore) -> None:
    _poison(run)

    assert _requeue(run, 1) == ["ANEW"]

    assert _dead(run) == [4, 5, 6, 7]
    assert run.store.run(operations.records([0, 1])) == [None, None]
    _check(run)


def test_a_unit_that_a_rewind_made_new_keeps_its_questions(run: RunInStore) -> None:
    run.create(1)
    run.store.run(operations.reconcile(run.lineage, 1, [0, 1]))  # 1 is not even known here
    run.store.run(operations.abandon(run.lineage, 1, "poison", to_dead_letters=True))

    assert _requeue(run, 3, 4) == ["ANEW", "FORGOTTEN"]

    assert [task.spec for task in run.lease()] == [b"spec 0", b"spec 1", b"spec 2", b"spec 3"]
    assert _dead(run) == [4, 5, 6, 7]
    _check(run)


@pytest.mark.parametrize("fate", ["claimed", "committed"])
def test_a_member_of_a_trained_unit_comes_too_late(run: RunInStore, fate: str) -> None:
    run.create(2)
    tasks = run.lease()
    run.submit(tasks[1:])
    _kill(run, tasks[:1])
    run.train(1)
    if fate == "committed":
        run.store.run(operations.commit(run.lineage, 1))

    assert _requeue(run, 0) == ["TRAINED"]
    assert _dead(run) == [0]
    _check(run)


def test_nothing_is_requeued_into_a_run_that_has_ended(run: RunInStore) -> None:
    _poison(run)
    run.store.run(operations.cancel(run.lineage))

    assert _requeue(run, 0, 99) == ["ENDED", "GONE"]


def test_purged_letters_are_gone_and_still_count_as_dead(run: RunInStore) -> None:
    run.create(2)
    tasks = run.lease()
    _kill(run, tasks[:1])
    run.submit(tasks[1:4])

    assert _purge(run, 0, 0, 1) == ["PURGED", "GONE", "GONE"]

    assert _dead(run) == []
    assert (run.stats().dead, run.stats().purged) == (1, 1)
    assert not run.redis.exists(f"{run.prefix}:t:0")
    _check(run)
    claim = run.store.run(operations.claim(run.lineage, 1, 1))
    assert claim.units[0].task_ids == [1, 2, 3]
    assert run.create(1) == 0


def test_a_unit_remembers_its_purged_members(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    _kill(run, tasks[:2])
    _purge(run, 0, 1)
    assert run.stats().open_units == 1

    _kill(run, tasks[2:3])  # of four, only one is left

    assert (run.stats().dropped, run.stats().dead) == ({"group_broken": 1}, 3)
    _check(run)
    assert _requeue(run, 2) == ["ANEW"]
    assert run.stats().purged == 0
    _check(run)


def test_letters_can_be_purged_when_redis_is_full(run: RunInStore) -> None:
    _poison(run)
    run.redis.config_set("maxmemory", 1)
    try:
        assert _purge(run, *range(8)) == ["PURGED"] * 8
    finally:
        run.redis.config_set("maxmemory", 512 * 2**20)


def test_a_reconciled_unit_of_dead_letters_only_is_trained(run: RunInStore) -> None:
    _poison(run, units=1)

    run.store.run(operations.reconcile(run.lineage, 1, [0]))  # an operator had revived it

    assert _dead(run) == []
    assert _check(run).tasks["claimed"] == {0, 1, 2, 3}


def test_peeking_shows_the_oldest_units_and_takes_nothing(run: RunInStore) -> None:
    run.create(3)
    tasks = run.lease()
    run.submit(tasks[4:8])
    run.submit(tasks[:4])

    waiting = run.store.run(operations.peek(5))

    assert [(unit.group_id, unit.task_ids) for unit in waiting] == [
        (1, [4, 5, 6, 7]),
        (0, [0, 1, 2, 3]),
    ]
    assert waiting[0].num_bytes == 4 * len(b"record 4")
    assert run.store.run(operations.peek(1)) == waiting[:1]
    assert run.stats().buffered == 8
