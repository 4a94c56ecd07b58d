"""Leases: grant, beat, submit, release, fail; and reap, which takes them back."""

from __future__ import annotations

import time

import pytest

from buffer import operations
from buffer.operations.leases import MAX_CHUNKS
from buffer.operations.values import BeatLine, LeasedTask, NewTask, SubmitLine
from buffer.store import Store
from configs.errors import RecordError
from tests.buffer.support.run_in_store import GROUP_SIZE, TTL_MS, RunInStore


def test_creating_twice_creates_once(run: RunInStore) -> None:
    assert run.create(3) == 3 * GROUP_SIZE
    assert run.create(4) == GROUP_SIZE
    assert run.stats().ready == 4 * GROUP_SIZE


def test_half_a_group_is_refused(run: RunInStore) -> None:
    with pytest.raises(RecordError, match="create groups whole"):
        operations.create(run.lineage, [NewTask(i, 0, b"") for i in (0, 1, 3)])


def test_groups_are_leased_whole_and_split_only_for_a_small_actor(run: RunInStore) -> None:
    run.create(4)

    assert [task.task_id for task in run.lease(6)] == [0, 1, 2, 3]
    assert [task.task_id for task in run.lease(3)] == [4, 5, 6]
    assert [task.task_id for task in run.lease(4)] == [7]
    assert [task.task_id for task in run.lease(8)] == [8, 9, 10, 11, 12, 13, 14, 15]


def test_the_spec_comes_with_the_lease(run: RunInStore) -> None:
    run.create(1)

    assert [task.spec for task in run.lease()] == [f"spec {i}".encode() for i in range(GROUP_SIZE)]


def test_fences_only_grow_even_when_the_stored_one_is_lost(run: RunInStore) -> None:
    run.create(2)
    first = run.lease(4)
    run.redis.hset(run.prefix + ":meta", "fence", 0)

    second = run.lease(4)

    assert second[0].fence > first[0].fence


def test_an_empty_store_says_empty_and_a_paused_run_says_wait(run: RunInStore) -> None:
    assert run.lease_status() == "EMPTY"
    run.create(1)
    for state in ("PAUSED", "RECOVERING"):
        run.redis.hset(run.prefix + ":meta", "state", state)
        assert run.lease_status() == "WAIT"


def test_chunks_append_only_where_the_stored_length_ends(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]

    assert run.beat(task, 0, 3) == ("OK", 3)
    assert run.beat(task, 0, 3) == ("OK", 3)  # the same again
    assert run.beat(task, 5, 2) == ("GAP", 3)  # 3 and 4 went missing
    assert run.beat(task, 2, 2) == ("GAP", 3)  # half known
    assert run.beat(task, 3, 4) == ("OK", 7)
    assert run.beat(task) == ("OK", 7)

    run.expire([task])
    again = run.lease(1)[0]
    assert (again.task_id, again.length) == (task.task_id, 7)
    assert b"".join(again.chunks) == b"0,1,2,3,4,5,6,"


def test_many_chunks_are_joined_in_order(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]

    for offset in range(600):
        assert run.beat(task, offset, 1) == ("OK", offset + 1)

    run.expire([task])
    again = run.lease(1)[0]
    assert len(again.chunks) < MAX_CHUNKS
    assert b"".join(again.chunks).split(b",")[:-1] == [b"%d" % i for i in range(600)]


def test_only_the_latest_fence_counts(run: RunInStore) -> None:
    run.create(1)
    old = run.lease()[0]
    run.expire([old])
    new = run.lease(1)[0]
    outdated = (old.task_id, old.fence)

    assert new.task_id == old.task_id
    assert run.beat(old, 0, 1) == ("STALE", 0)
    assert run.submit([old]) == ["STALE"]
    assert run.store.run(operations.release([outdated])) == ["STALE"]
    failure = (*outdated, "data", "")
    assert run.store.run(operations.fail(max_attempts=1, failures=[failure])) == ["STALE"]
    assert run.submit([new, new]) == ["OK", "DUP"]


def test_a_task_nobody_leased_accepts_no_fence(run: RunInStore) -> None:
    run.create(1)

    lines = [SubmitLine(0, 0, b"x"), SubmitLine(99, 0, b"x")]
    assert run.store.run(operations.submit(lines)) == ["STALE", "GONE"]


@pytest.mark.parametrize("action", ["beat", "submit"])
def test_a_reaped_lease_is_revived_by_its_holder(run: RunInStore, action: str) -> None:
    run.create(1)
    task = run.lease()[0]
    run.beat(task, 0, 2)
    run.expire([task])
    assert run.stats().ready == 1

    if action == "beat":
        assert run.beat(task, 2, 2) == ("OK", 4)
        assert run.stats().leased == GROUP_SIZE
    else:
        assert run.submit([task]) == ["OK"]
        assert run.stats().buffered == 1
    assert run.stats().ready == 0


def _stand_still(run: RunInStore, task: LeasedTask, ms: int) -> tuple[str, int]:
    """Beat as if the last progress had been so long ago."""
    key = f"{run.prefix}:t:{task.task_id}"
    run.redis.hincrby(key, "progress", -ms)
    line = BeatLine(task.task_id, task.fence)
    call = operations.beat(ttl_ms=TTL_MS, lines=[line], progress_timeout_ms=60_000, max_attempts=2)
    return run.store.run(call)[0]


def test_a_heartbeat_without_progress_is_no_life(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]
    assert run.beat(task, 0, 3) == ("OK", 3)

    assert _stand_still(run, task, 50_000) == ("OK", 3)
    assert _stand_still(run, task, 50_000) == ("TAKEN", 3)

    assert run.stats().ready == 1
    assert run.beat(task, 3, 1) == ("STALE", 0)  # not even with a token: it was told to stop
    again = run.lease(1)[0]
    assert (again.task_id, again.length) == (task.task_id, 3)
    assert _stand_still(run, again, 70_000) == ("TAKEN", 3)
    assert run.stats().dead == 1


def test_time_in_which_nothing_could_arrive_is_nobodys_failure(run: RunInStore) -> None:
    """The server was stopped, or its clock jumped: no broker has reaped since."""
    run.create(1)
    first, late = run.lease(2)
    run.store.run(operations.reap(max_attempts=3))
    run.redis.hincrby(f"{run.prefix}:meta", "reaped_at", -TTL_MS)

    assert _stand_still(run, first, 70_000) == ("OK", 0)
    old = BeatLine(first.task_id, first.fence)
    assert run.store.run(operations.beat(ttl_ms=TTL_MS, lines=[old], longest_ms=1)) == [("OK", 0)]

    run.redis.hincrby(f"{run.prefix}:meta", "reaped_at", TTL_MS)
    assert run.expire([late]) == [late.task_id]
    assert _stand_still(run, late, 70_000) == ("STALE", 0), "it was charged when it expired"
    assert _stand_still(run, first, 0) == ("TAKEN", 0), "a broker reaps again"


def test_a_failure_counts_once_however_often_it_is_reported(run: RunInStore) -> None:
    run.create(1)
    first, second = run.lease(2)
    for task, kind in ((first, "data"), (second, "infra")):
        row = (task.task_id, task.fence, kind, "why")
        call = operations.fail(max_attempts=3, max_data_failures=3, failures=[row] * 9)
        assert run.store.run(call) == ["OK"] + ["STALE"] * 8
        assert run.store.run(call) == ["STALE"] * 9, "an honest actor that got no reply"

    assert run.stats().dead == 0
    assert {task.task_id: task.length for task in run.lease(4)} == dict.fromkeys(range(4), 0)


@pytest.mark.parametrize("is_reaped", [False, True])
def test_no_heartbeat_on_its_way_revives_what_its_holder_gave_up(
    run: RunInStore, is_reaped: bool
) -> None:
    run.create(1)
    released, failed, *_ = tasks = run.lease()
    if is_reaped:
        run.expire(tasks)
    leased = run.stats().leased

    release = operations.release([(released.task_id, released.fence)])
    failure = (failed.task_id, failed.fence, "data", "why")
    fail = operations.fail(max_attempts=3, failures=[failure])
    assert run.store.run(release) == ["OK"]
    assert run.store.run(fail) == ["DUP" if is_reaped else "OK"]

    assert [run.beat(task, 0, 1) for task in (released, failed)] == [("STALE", 0)] * 2
    assert run.submit([released, failed]) == ["STALE"] * 2
    assert run.stats().leased == leased - (0 if is_reaped else 2)


def test_new_tokens_are_progress(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]

    for length in range(3):
        assert _stand_still(run, task, 50_000) == ("OK", length)
        assert run.beat(task, length, 1) == ("OK", length + 1)
    line = BeatLine(task.task_id, task.fence, 3, 1, b"3,")
    run.redis.hincrby(f"{run.prefix}:t:{task.task_id}", "progress", -(10**9))
    assert run.store.run(operations.beat(ttl_ms=TTL_MS, lines=[line])) == [("OK", 4)]


def test_time_in_which_nothing_could_arrive_is_no_standstill(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]
    run.redis.hset(run.prefix + ":meta", "grace_until", 2**52)

    assert _stand_still(run, task, 10**9) == ("OK", 0)


def test_each_kind_of_failure_has_its_own_budget(run: RunInStore) -> None:
    run.create(1)
    run.lease(1)
    task = run.lease(1)[0]
    for kind, length in (("data", 1), ("infra", 2), ("data", 3), ("infra", 4), ("infra", 4)):
        run.beat(task, length - 1, 1)
        row = (task.task_id, task.fence, kind, "")
        run.store.run(operations.fail(max_attempts=3, max_data_failures=3, failures=[row]))
        assert run.stats().dead == 0
        task = run.lease(1)[0]

    row = (task.task_id, task.fence, "data", "the third")
    run.store.run(operations.fail(max_attempts=3, max_data_failures=3, failures=[row]))

    assert run.stats().dead == 1


def test_a_request_for_begun_tasks_gets_those_alone_that_came_back(run: RunInStore) -> None:
    run.create(2)
    version = (run.lineage, 0)
    trained = run.lease(n=1)
    run.create_eval(2)
    begun = [(task.task_id, task.fence) for task in (*trained, *run.lease(n=1))]
    call = operations.lease("b", ttl_ms=TTL_MS, n=9, version=version, begun_only=True)
    assert run.store.run(call).status == "WAIT", "an evaluation, a unit and a half are to be begun"

    run.store.run(operations.release(begun))

    assert {task.task_id for task in run.store.run(call).tasks} == {task for task, _ in begun}
    assert run.store.run(call).tasks == []
    assert len(run.lease()) == 2 * GROUP_SIZE - 1 + 1


def test_released_tasks_go_first_and_cost_no_attempt(run: RunInStore) -> None:
    run.create(2)
    tasks = run.lease(4)
    for _ in range(5):
        assert run.store.run(operations.release([(tasks[3].task_id, tasks[3].fence)])) == ["OK"]
        tasks[3] = run.lease(1)[0]
        assert tasks[3].task_id == 3
    assert run.stats().dead == 0


def test_a_request_that_is_repeated_is_granted_what_nobody_has_renewed(run: RunInStore) -> None:
    run.create(3)
    run.create_eval(1)

    def lease(seq: int, *, incarnation: str = "a", key: str = "k") -> list[LeasedTask]:
        version = (run.lineage, 0)
        call = operations.lease(incarnation, ttl_ms=TTL_MS, n=5, version=version, key=key, seq=seq)
        return run.store.run(call).tasks

    first = lease(7)
    assert lease(7) == first

    time.sleep(0.002)  # its deadline is another
    run.beat(first[1], key="k")
    run.store.run(operations.release([(first[2].task_id, first[2].fence)], "k"))
    assert lease(7) == [first[0], *first[3:]]

    theirs = [lease(7, incarnation="b"), lease(7, key="other"), lease(0, incarnation="c")]
    assert not {task.task_id for tasks in theirs for task in tasks} & {t.task_id for t in lease(7)}
    assert lease(8) == [], "all are held"


def test_what_a_request_was_granted_that_was_given_up_goes_back_uncharged(run: RunInStore) -> None:
    run.create(2)

    def lease(seq: int, abandoned: tuple[int, ...]) -> list[LeasedTask]:
        call = operations.lease(
            "a", ttl_ms=TTL_MS, n=4, version=(run.lineage, 0), seq=seq, abandoned=abandoned
        )
        return run.store.run(call).tasks

    first = lease(14, (9,))
    assert [task.task_id for task in lease(16, (12, 13))] == [4, 5, 6, 7], "14 was answered"
    held = lease(18, (4, 16))
    assert [task.task_id for task in held] == [4, 5, 6, 7]
    assert run.submit(first) == ["OK"] * 4
    assert run.submit(held) == ["OK"] * 4


def test_a_late_copy_of_an_earlier_request_gets_nothing(run: RunInStore) -> None:
    run.create(3)

    def lease(seq: int, *abandoned: int) -> list[LeasedTask]:
        call = operations.lease(
            "a", ttl_ms=TTL_MS, n=4, version=(run.lineage, 0), seq=seq, abandoned=abandoned
        )
        return run.store.run(call).tasks

    unheard = lease(15, 10)
    assert lease(10) == [], "given up; through a broker that still held it"
    assert lease(15, 10) == unheard, "it is still the last that was granted"


def _store(
    run: RunInStore, task: LeasedTask, offset: int, tokens: int, *fences: int
) -> tuple[str, int]:
    """Send tokens that were made under the first to the last of some fences."""
    chunk = f"{fences[0]}-{fences[-1]}:{tokens} ".encode()
    line = BeatLine(task.task_id, task.fence, offset, tokens, chunk)
    line = line._replace(first_fence=fences[0], last_fence=fences[-1])
    return run.store.run(operations.beat(ttl_ms=TTL_MS, lines=[line]))[0]


def _next(run: RunInStore, task: LeasedTask) -> LeasedTask:
    run.store.run(operations.release([(task.task_id, task.fence)]))
    (again,) = run.lease(1)
    return again


def test_an_episode_that_begins_again_replaces_what_could_not_be_continued(run: RunInStore) -> None:
    run.create(1)
    (first, *_) = run.lease()
    assert _store(run, first, 0, 9, first.fence) == ("OK", 9)
    again = _next(run, first)
    assert again.length == 9

    assert _store(run, again, 0, 2, again.fence) == ("OK", 2)
    assert _store(run, again, 0, 5, again.fence) == ("OK", 5)
    assert _store(run, again, 0, 3, again.fence) == ("OK", 5), "a late copy"

    last = _next(run, again)
    assert (last.length, last.chunks) == (5, (b"%d-%d:5 " % (again.fence, again.fence),))
    assert _store(run, last, 0, 2, again.fence, last.fence) == ("OK", 5), "of what it continues"


def test_tokens_of_earlier_leases_than_those_stored_end_the_lease_and_are_charged(
    run: RunInStore,
) -> None:
    """Nobody could go on with them: fences never decrease in a completion."""
    run.create(1)
    (first, *_) = run.lease()
    assert _store(run, first, 0, 3, first.fence) == ("OK", 3)
    liar = _next(run, first)
    assert _store(run, liar, 3, 2, first.fence, liar.fence) == ("OK", 5), "as after a lost write"

    assert _store(run, liar, 5, 1, first.fence) == ("TAKEN", 5)

    assert run.redis.hget(f"{run.prefix}:t:{liar.task_id}", "att") == b"1"
    (honest,) = run.lease(1)
    assert (honest.task_id, honest.length) == (liar.task_id, 5)
    assert _store(run, honest, 5, 1, honest.fence) == ("OK", 6)


def test_leases_expire_in_redis_time(run: RunInStore) -> None:
    run.create(1)
    call = operations.lease("a", ttl_ms=-1, n=4, version=(run.lineage, 0))
    run.store.run(call)

    assert sorted(run.store.run(operations.reap(max_attempts=3))) == [0, 1, 2, 3]
    assert run.store.run(operations.reap(max_attempts=3)) == []


@pytest.mark.parametrize("ahead_ms", [-10_000, 3_600_000])
def test_no_lease_expires_for_what_a_stopped_server_or_its_clock_has_done(
    run: RunInStore, ahead_ms: int
) -> None:
    """The last reap was long ago, or is in the future."""
    run.create(1)
    run.store.run(operations.lease("a", ttl_ms=200, n=4, version=(run.lineage, 0)))
    run.redis.zadd(f"{run.prefix}:lease", {"0": 1, "1": 1, "2": 1, "3": time.time_ns() / 1e6 + 1e7})
    run.redis.hset(f"{run.prefix}:meta", "reaped_at", round(time.time() * 1e3) + ahead_ms)

    assert run.store.run(operations.reap(max_attempts=3)) == []

    run.redis.hset(f"{run.prefix}:meta", "grace_until", 0)
    time.sleep(0.25)
    assert run.store.run(operations.reap(max_attempts=3)) == [0, 1, 2, 3]


def test_a_reap_before_the_run_does_not_look_like_another_run(store: Store, redis_url: str) -> None:
    assert store.run(operations.reap(max_attempts=3)) == []

    with RunInStore(store, redis_url) as run:
        assert run.stats().state == "RUNNING"


def test_attempts_without_progress_kill_a_task_and_progress_saves_it(run: RunInStore) -> None:
    run.create(1)
    run.lease(1)
    task = run.lease(1)[0]

    for length in range(4):
        run.beat(task, length, 1)
        assert run.expire([task]) == [task.task_id]
        task = run.lease(1)[0]
    assert run.expire([task]) == [task.task_id]
    task = run.lease(1)[0]
    assert run.stats().dead == 0

    run.expire([task])
    assert run.stats().dead == 1
    assert run.submit([task]) == ["STALE"]


def test_a_unit_that_breaks_during_a_reap_takes_its_other_expired_leases_along(
    run: RunInStore,
) -> None:
    run.create(1)
    tasks = run.lease()

    assert len(run.expire(tasks, max_attempts=1)) == 3  # with one member left, the unit is dropped

    stats = run.stats()
    assert (stats.ready, stats.dead, stats.dropped) == (0, 3, {"group_broken": 1})


def test_leases_of_an_actor_that_is_known_to_be_dead_are_over_at_once(run: RunInStore) -> None:
    run.create(2)
    run.create_eval(1)
    lost = run.lease(5, incarnation="dead")
    kept = run.lease(4, incarnation="living")
    run.beat(lost[1], 0, 7)

    orphans = run.store.run(operations.release_dead_actor("dead", "", max_attempts=3))

    assert sorted(orphans) == sorted(task.task_id for task in lost)
    assert run.beat(kept[0]) == ("OK", 0)
    assert run.beat(lost[0])[0] == "STALE", "its last words come late"
    again = {task.task_id: task for task in run.lease(5, incarnation="next")}
    assert sorted(again) == sorted(orphans)
    assert again[lost[1].task_id].length == 7
    seen = run.store.run(operations.inspect())
    assert {seen[task.task_id].attempts for task in lost[1:]} == {1}, "it may be what killed it"
    assert run.submit(lost[1:2]) == ["STALE"]
    assert run.store.run(operations.release_dead_actor("dead", "", max_attempts=3)) == []


def test_a_death_ends_no_lease_that_another_key_has_under_this_name(run: RunInStore) -> None:
    run.create(2)
    keys = ("one", "other")
    calls = [operations.lease("a", ttl_ms=TTL_MS, n=4, version=(1, 0), key=key) for key in keys]
    _, kept = [run.store.run(call).tasks for call in calls]

    orphans = run.store.run(operations.release_dead_actor("a", "one", max_attempts=3))

    assert len(orphans) == 4
    assert [run.beat(task, key="other")[0] for task in kept] == ["OK"] * 4
    assert run.store.run(operations.release_dead_actor("a", "", max_attempts=3)) == []


def test_nobody_is_bereaved_while_the_store_is_not_to_be_trusted(run: RunInStore) -> None:
    run.create(1)
    run.lease()
    run.redis.hset(run.prefix + ":meta", "state", "RECOVERING")

    assert run.store.run(operations.release_dead_actor("a", "", max_attempts=3)) == []
    assert run.stats().leased == GROUP_SIZE


def test_data_failures_count_always_and_leave_their_reason(run: RunInStore) -> None:
    run.create(1)
    task = run.lease()[0]
    for attempt in range(3):
        run.beat(task, attempt, 1)
        row = (task.task_id, task.fence, "data", "reward raised KeyError")
        call = operations.fail(max_attempts=1, max_data_failures=3, failures=[row])
        assert run.store.run(call) == ["OK"]
        task = (run.lease(1) or [task])[0]

    assert run.stats().dead == 1
    assert run.redis.hget(f"{run.prefix}:t:{task.task_id}", "why") == b"reward raised KeyError"


def _kill(run: RunInStore, tasks: list[LeasedTask]) -> None:
    rows = [(task.task_id, task.fence, "data", "bad") for task in tasks]
    run.store.run(operations.fail(max_attempts=1, max_data_failures=1, failures=rows))


def test_a_unit_goes_on_without_a_dead_member(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    _kill(run, tasks[:1])
    assert run.submit(tasks[1:]) == ["OK"] * 3

    claim = run.store.run(operations.claim(run.lineage, 1, 1))

    assert [unit.task_ids for unit in claim.units] == [[1, 2, 3]]


def test_a_unit_whose_last_member_dies_is_complete(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    run.submit(tasks[:3])
    _kill(run, tasks[3:])

    assert run.stats().buffered_units == 1


def test_a_broken_unit_is_dropped_whole_and_gives_its_place_back(run: RunInStore) -> None:
    run.create(6)
    tasks = run.lease()
    assert run.lease_status() == "WAIT"
    run.submit(tasks[:1])

    _kill(run, tasks[1:4])

    stats = run.stats()
    assert (stats.dropped, stats.dead) == ({"group_broken": 1}, 3)
    assert run.lease_status(4) == "OK"


def test_a_unit_broken_early_takes_its_live_leases_along(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()

    _kill(run, tasks[:3])

    assert run.submit(tasks[3:]) == ["GONE"]
    assert run.stats().dropped == {"group_broken": 1}


def test_one_call_handles_more_lines_than_one_slice(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    lines = [BeatLine(task.task_id, task.fence) for task in tasks] * 300

    assert len(run.store.run(operations.beat(ttl_ms=TTL_MS, lines=lines))) == 1200


def test_actors_are_listed_with_what_they_said(run: RunInStore) -> None:
    seen = {"host-1": {"tokens_per_s": "12.5", "lost": "0"}, "host-2": {}, "host-3": {"pid": "7"}}

    run.store.run(operations.actor_seen(seen))

    actors = run.store.run(operations.actors())
    assert {actor.incarnation: actor.fields for actor in actors} == seen
    assert all(0 <= actor.silent_s < 5 for actor in actors)


def test_what_an_actor_said_before_is_replaced_and_any_number_of_figures_is_written(
    run: RunInStore,
) -> None:
    run.store.run(operations.actor_seen({"a": {"old": "1"}}))
    many = {f"name {i}": "1" for i in range(5000)}

    run.store.run(operations.actor_seen({"a": many, "b": {"pid": "7"}}))

    seen = {actor.incarnation: actor.fields for actor in run.store.run(operations.actors())}
    assert seen == {"a": many, "b": {"pid": "7"}}


def test_a_record_is_with_its_task_or_nowhere(run: RunInStore) -> None:
    run.create(1)
    tasks = run.lease()
    foreign = [tasks[1]._replace(fence=tasks[1].fence - 1)]

    verdicts = run.submit([tasks[0], *foreign, tasks[0], tasks[2]])

    assert verdicts == ["OK", "STALE", "DUP", "OK"]
    assert not run.redis.keys("*:in:*")
    records = run.store.run(operations.records([task.task_id for task in tasks]))
    assert [record is not None for record in records[:3]] == [True, False, True]


def test_a_task_that_nobody_has_begun_is_seen_as_ready(run: RunInStore) -> None:
    run.create(1)

    seen = run.store.run(operations.inspect([1, 99]))

    assert list(seen) == [1], "99 does not exist"
    assert (seen[1].state, seen[1].fence, seen[1].length) == ("R", 0, 0)
