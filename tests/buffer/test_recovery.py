"""A store that lost its last seconds: closed until the learner has restored what it trained.

A rewind is played by restoring the run's keys as they were before: that is all that a Redis which
began again from its files can show its clients, besides another run_id.
"""

from __future__ import annotations

import pytest
import redis

from buffer import operations
from buffer.operations.values import LeasedTask
from configs.errors import LostLineage, StoreError
from tests.buffer.support import invariants
from tests.buffer.support.run_in_store import GROUP_SIZE, TTL_MS, RunInStore

NEW_SERVER = "f" * 40


class Rewind:
    """The run's keys at one moment, to go back to."""

    def __init__(self, client: redis.Redis) -> None:
        """Remember all keys."""
        self._client = client
        self._dumps = {key: client.dump(key) or b"" for key in client.scan_iter("*")}

    def restore(self) -> None:
        """Forget everything since."""
        self._client.flushdb()
        for key, dump in self._dumps.items():
            self._client.restore(key, 0, dump)


def _confirm(run: RunInStore, run_id: str = NEW_SERVER) -> str:
    return run.store.run(operations.confirm(run_id))


def _reconcile(run: RunInStore, k: int, groups: list[int]) -> int:
    return run.store.run(operations.reconcile(run.lineage, k, groups))


def _recovered(run: RunInStore) -> int:
    return run.store.run(operations.recovered(run.lineage, NEW_SERVER))


def _check(run: RunInStore) -> invariants.Snapshot:
    run.stats()
    return invariants.check(run.redis, run.prefix, GROUP_SIZE)


def _submitted(run: RunInStore, units: int) -> list[LeasedTask]:
    tasks = run.lease(units * GROUP_SIZE)
    assert run.submit(tasks) == ["OK"] * units * GROUP_SIZE
    return tasks


def test_the_server_that_the_run_began_on_is_confirmed(run: RunInStore) -> None:
    assert _confirm(run, run.redis.info("server")["run_id"]) == "RUNNING"


def test_a_store_that_knows_no_run_says_so(run: RunInStore) -> None:
    run.redis.flushdb()

    assert _confirm(run) == "NONE"


def test_another_server_closes_leasing_claiming_and_reaping_only(run: RunInStore) -> None:
    run.create(4)
    tasks = run.lease(8)
    run.submit(tasks[:4])

    assert _confirm(run) == "RECOVERING"

    assert run.stats().state == "RECOVERING"
    assert run.lease_status() == "WAIT"
    claim = run.store.run(operations.claim(run.lineage, 1, 1))
    assert (claim.units, claim.complete) == ([], False)
    assert run.expire(tasks[4:5]) == []
    assert run.beat(tasks[4], 0, 2) == ("OK", 2)
    assert run.submit(tasks[5:6]) == ["OK"]
    assert run.store.run(operations.release([(tasks[6].task_id, tasks[6].fence)])) == ["OK"]
    failure = (tasks[7].task_id, tasks[7].fence, "infra", "lost")
    assert run.store.run(operations.fail(max_attempts=3, failures=[failure])) == ["OK"]
    assert run.store.run(operations.begin_lineage(run.lineage, 0)) == run.lineage + 1


def test_after_the_recovery_all_goes_on_and_no_lease_is_reaped_for_a_ttl(run: RunInStore) -> None:
    run.create(2)
    tasks = run.lease(4)
    _confirm(run)

    assert _recovered(run) == TTL_MS

    assert (_confirm(run), run.stats().state) == ("RUNNING", "RUNNING")
    assert run.lease_status(4) == "OK"
    assert run.expire(tasks) == []
    run.redis.hset(run.prefix + ":meta", "grace_until", 1)  # a ttl later
    assert len(run.expire(tasks)) == 4


def test_a_recovery_before_the_first_lease_delays_no_reaping(run: RunInStore) -> None:
    run.create(2)
    _confirm(run)

    assert _recovered(run) == 0

    assert len(run.expire(run.lease(4))) == 4


def test_a_recovery_under_a_server_that_is_gone_does_not_count(run: RunInStore) -> None:
    _confirm(run)
    _confirm(run, "e" * 40)

    with pytest.raises(StoreError, match="recover again"):
        _recovered(run)

    assert run.stats().state == "RECOVERING"


@pytest.mark.parametrize("lost", ["claim", "submit", "lease", "create", "nothing"])
def test_a_trained_batch_is_a_sealed_claim_again_whatever_was_lost(
    run: RunInStore, lost: str
) -> None:
    rewinds = {"create": Rewind(run.redis)}
    run.create(6)
    rewinds["lease"] = Rewind(run.redis)
    tasks = run.lease(12)
    run.beat(tasks[0], 0, 3)
    rewinds["submit"] = Rewind(run.redis)
    run.submit(tasks)
    rewinds["claim"] = Rewind(run.redis)
    run.train(1)
    rewinds["nothing"] = Rewind(run.redis)
    rewinds[lost].restore()
    _confirm(run)

    _reconcile(run, 1, [1, 0])
    _reconcile(run, 1, [1, 0])
    run.store.run(operations.advance(run.lineage, 1))
    _recovered(run)

    claim = run.store.run(operations.claim(run.lineage, 1, 2))
    assert claim.sealed
    assert [unit.group_id for unit in claim.units] == [1, 0]
    snapshot = _check(run)
    assert snapshot.tasks["claimed"] == set(range(8))
    assert run.submit(tasks[:1]) == ["STALE" if lost in ("create", "lease") else "DUP"]
    run.create(6)
    assert run.store.run(operations.commit(run.lineage, 1)) == 8
    assert _check(run).tasks["committed"] == set(range(8))


def test_what_else_the_store_had_in_the_batch_goes_back_to_the_buffer(run: RunInStore) -> None:
    run.create(4)
    _submitted(run, 3)
    run.store.run(operations.claim(run.lineage, 1, 2))
    _confirm(run)

    _reconcile(run, 1, [2, 0])  # 1 was dropped, 2 came instead, and the store forgot both

    snapshot = _check(run)
    assert (snapshot.units["c:1"], snapshot.units["buf"]) == ({0, 2}, {1})
    assert run.stats().claims[0].sealed


def test_a_unit_leaves_the_other_batch_that_the_store_had_it_in(run: RunInStore) -> None:
    run.create(4)
    _submitted(run, 3)
    run.store.run(operations.claim(run.lineage, 1, 2))
    run.store.run(operations.seal(run.lineage, 1))
    _confirm(run)

    _reconcile(run, 2, [0])
    assert [(c.k, c.units, c.sealed) for c in run.stats().claims] == [(1, 1, False), (2, 1, True)]
    _reconcile(run, 2, [0, 1])

    assert [(c.k, c.units) for c in run.stats().claims] == [(2, 2)]
    _check(run)


def test_a_batch_may_be_emptied(run: RunInStore) -> None:
    run.create(2)
    _submitted(run, 2)
    run.store.run(operations.claim(run.lineage, 1, 2))

    _reconcile(run, 1, [])

    assert run.stats().claims == ()
    assert _check(run).units["buf"] == {0, 1}


def test_the_newest_word_on_a_batch_counts(run: RunInStore) -> None:
    run.create(2)
    _reconcile(run, 1, [1, 0])

    _reconcile(run, 1, [0])

    snapshot = _check(run)
    assert (snapshot.units["c:1"], snapshot.units["buf"]) == ({0}, {1})


def test_an_unsealed_batch_is_topped_up_again(run: RunInStore) -> None:
    run.create(4)
    _submitted(run, 3)
    _confirm(run)
    run.store.run(operations.reconcile(run.lineage, 1, [2], sealed=False))
    _recovered(run)

    claim = run.store.run(operations.claim(run.lineage, 1, 2))

    assert [unit.group_id for unit in claim.units] == [2, 0]


def test_large_batches_are_reconciled_in_slices_and_in_order(run: RunInStore) -> None:
    groups = list(reversed(range(100)))

    assert _reconcile(run, 1, groups) == 100

    claim = run.store.run(operations.claim(run.lineage, 1, 100))
    assert [unit.group_id for unit in claim.units] == groups
    _check(run)


@pytest.mark.parametrize("dead", [{1}, {1, 2}])
def test_dead_members_stay_dead_letters(run: RunInStore, dead: set[int]) -> None:
    run.create(1)
    tasks = run.lease(4)
    failures = [(tasks[i].task_id, tasks[i].fence, "data", "bad") for i in dead]
    run.store.run(operations.fail(max_attempts=1, max_data_failures=1, failures=failures))
    _confirm(run)

    _reconcile(run, 1, [0])

    snapshot = _check(run)
    assert (snapshot.tasks["dead"], snapshot.tasks["claimed"]) == (dead, {0, 1, 2, 3} - dead)


@pytest.mark.parametrize("lost", ["commit", "claim", "create"])
def test_what_a_checkpoint_holds_is_committed_again_and_never_made_again(
    run: RunInStore, lost: str
) -> None:
    rewinds = {"create": Rewind(run.redis)}
    run.create(4)
    _submitted(run, 2)
    rewinds["claim"] = Rewind(run.redis)
    run.train(1)
    rewinds["commit"] = Rewind(run.redis)
    run.store.run(operations.commit(run.lineage, 1))
    rewinds[lost].restore()
    _confirm(run)

    assert run.store.run(operations.restore_committed(run.lineage, [0, 1])) == 2
    assert run.store.run(operations.restore_committed(run.lineage, [0, 1])) == 0
    _reconcile(run, 1, [0, 1])
    run.store.run(operations.advance(run.lineage, 1))
    run.store.run(operations.commit(run.lineage, 1))
    _recovered(run)

    assert run.create(4) == (8 if lost == "create" else 0)
    assert _check(run).tasks["committed"] == set(range(8))
    assert [task.task_id for task in run.lease(4)] == [8, 9, 10, 11]
    assert run.stats().claims == ()


def test_a_dropped_unit_that_was_trained_is_dropped_no_more(run: RunInStore) -> None:
    run.create(2)
    _submitted(run, 2)
    run.store.run(operations.claim(run.lineage, 1, 2))
    run.store.run(operations.drop(run.lineage, 1, [0], "stale"))

    _reconcile(run, 1, [0, 1])

    assert run.stats().dropped == {"stale": 0}
    _check(run)


def test_a_lineage_that_the_store_forgot_is_not_given_out_again(run: RunInStore) -> None:
    before = Rewind(run.redis)
    forgotten = run.store.run(operations.begin_lineage(run.lineage, 0))
    before.restore()

    call = operations.begin_lineage(run.lineage, 0, at_least=(forgotten or 0) + 1)
    assert run.store.run(call) == run.store.run(call) == run.lineage + 2

    assert run.store.run(operations.lineages()) == {1: 0, 2: 0, 3: 0}
    with pytest.raises(LostLineage):
        run.store.run(operations.advance(forgotten or 0, 1))


def test_a_finished_run_stays_finished_until_a_learner_goes_on(run: RunInStore) -> None:
    run.store.run(operations.cancel(run.lineage))

    assert _confirm(run) == "ENDED"
    assert run.lease_status() == "DONE"

    run.lineage = run.store.run(operations.begin_lineage(run.lineage, 0)) or 0
    assert run.stats().state == "RECOVERING"


def test_recovery_needs_the_lineage(run: RunInStore) -> None:
    for call in (
        operations.reconcile(run.lineage - 1, 1, [0]),
        operations.restore_committed(run.lineage - 1, [0]),
        operations.recovered(run.lineage - 1, NEW_SERVER),
    ):
        with pytest.raises(LostLineage):
            run.store.run(call)


def test_a_full_redis_can_be_recovered(run: RunInStore) -> None:
    run.create(4)
    _submitted(run, 2)
    run.redis.config_set("maxmemory", 1)
    try:
        assert _confirm(run) == "RECOVERING"
        assert _reconcile(run, 1, [0]) == 1
        assert run.store.run(operations.restore_committed(run.lineage, [1])) == 1
        assert _recovered(run) == TTL_MS
    finally:
        run.redis.config_set("maxmemory", 512 * 2**20)
