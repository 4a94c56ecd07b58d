"""Keys in the store: who gets leases, who is suspended, and whose failures kill a task."""

from __future__ import annotations

import re

import pytest

from buffer import operations
from buffer.operations.values import LeasedTask
from tests.buffer.support.invariants import zset
from tests.buffer.support.run_in_store import TTL_MS, RunInStore


def lease(run: RunInStore, key: str, n: int = 100) -> list[LeasedTask]:
    call = operations.lease(f"of {key}", ttl_ms=TTL_MS, n=n, version=(run.lineage, 0), key=key)
    return run.store.run(call).tasks


def fail(run: RunInStore, key: str, tasks: list[LeasedTask], kind: str = "data") -> list[str]:
    rows = [(task.task_id, task.fence, kind, "why") for task in tasks]
    return run.store.run(operations.fail(key, max_attempts=3, max_data_failures=3, failures=rows))


def test_the_largest_holder_gives_its_newest_leases_down_to_an_even_share(run: RunInStore) -> None:
    run.create(3)
    first, second, small = lease(run, "a", 4), lease(run, "a", 4), lease(run, "b", 4)

    given = run.store.run(operations.share("c", 1, 100, still_ms=0, token_ms=1))

    assert given == [task.task_id for task in reversed(second)], "8 of 12 over three keys: 4 each"
    assert run.submit(second, "a") == ["STALE"] * 4
    assert run.submit(first, "a") == ["OK"] * 4
    assert run.beat(small[0], key="b") == ("OK", 0)
    assert [task.task_id for task in lease(run, "c")] == sorted(given)


def test_who_holds_a_lease_takes_none_from_others_and_nobody_takes_an_even_share(
    run: RunInStore,
) -> None:
    run.create(2)
    lease(run, "a", 4)
    lease(run, "a", 3)
    lease(run, "b", 1)

    assert run.store.run(operations.share("b", 1, 100, still_ms=0, token_ms=1)) == []
    assert len(run.store.run(operations.share("c", 1, 2, still_ms=0, token_ms=1))) == 2
    assert len(lease(run, "c")) == 2
    assert run.store.run(operations.share("d", 1, 100, still_ms=0, token_ms=1)) == [4, 3], (
        "8 over four keys: 2 each"
    )
    assert len(lease(run, "d")) == 2
    assert run.store.run(operations.share("e", 1, 100, still_ms=0, token_ms=1)) == [2], "3 over 2"
    assert len(lease(run, "e")) == 1
    assert run.store.run(operations.share("f", 1, 100, still_ms=0, token_ms=1)) == []


def test_what_grows_stays_where_it_is(run: RunInStore) -> None:
    run.create(1)
    for task in lease(run, "a"):
        assert run.beat(task, 0, 1, key="a") == ("OK", 1)

    assert run.store.run(operations.share("b", 1, 100, still_ms=60_000, token_ms=1)) == []
    assert len(run.store.run(operations.share("b", 1, 100, still_ms=0, token_ms=1))) == 2


def test_who_has_twice_an_even_share_gives_what_it_has_not_begun_at_once(run: RunInStore) -> None:
    run.create(3)
    held = lease(run, "a", 8)
    begun = held[-1]
    run.beat(begun, 0, 1, key="a")
    share = operations.share("c", 1, 100, still_ms=60_000, token_ms=1)

    given = run.store.run(share)

    assert given == [task.task_id for task in reversed(held[3:7])], "4 of 8, and nothing begun"
    assert run.beat(begun, 1, 1, key="a") == ("OK", 2)
    lease(run, "b", 4)
    assert run.store.run(share) == [], "8 over 3 keys: 4 is not twice as many as 3"


def test_what_others_had_made_before_is_not_begun(run: RunInStore) -> None:
    run.create(1)
    for task in lease(run, "a"):
        run.beat(task, 0, 3, key="a")
    run.store.run(operations.suspend("a", "why"))
    resumed = lease(run, "b")
    assert [task.length for task in resumed] == [3] * 4
    run.beat(resumed[0], 3, 1, key="b")
    run.beat(resumed[1], 3, 1, key="b")

    given = run.store.run(operations.share("c", 1, 100, still_ms=60_000, token_ms=1))

    assert given == [task.task_id for task in reversed(resumed[2:])]


def test_a_token_now_and_then_keeps_nothing_that_another_could_have(run: RunInStore) -> None:
    run.create(1)
    tasks = lease(run, "a")
    ages = {task.task_id: 10 if task in tasks[:2] else 4 for task in tasks}
    for task in tasks:
        run.beat(task, 0, 3, key="a")
        older = task.fence - 1_000_000 * ages[task.task_id]
        run.redis.hset(f"{run.prefix}:t:{task.task_id}", "fence", older)

    def given(token_ms: float) -> list[int]:
        return run.store.run(operations.share("b", 1, 100, still_ms=5000, token_ms=token_ms))

    assert given(4000) == []
    assert given(2000) == [tasks[1].task_id, tasks[0].task_id], "3 in 10 s, where there is 2 s each"


def test_what_has_had_no_token_for_so_long_goes_however_much_it_has(run: RunInStore) -> None:
    run.create(1)
    tasks = lease(run, "a")
    for task in tasks:
        run.beat(task, 0, 3, key="a")
    still = tasks[1]
    run.redis.hincrby(f"{run.prefix}:t:{still.task_id}", "progress", -10_000)

    given = run.store.run(operations.share("b", 1, 100, still_ms=5000, token_ms=10_000))

    assert given == [still.task_id]


def test_a_fence_is_worth_nothing_to_another_key(run: RunInStore) -> None:
    run.create(1)
    tasks = lease(run, "a")
    rows = [(task.task_id, task.fence) for task in tasks]

    assert [run.beat(task, 0, 1, key="b") for task in tasks] == [("STALE", 0)] * 4
    assert run.store.run(operations.release(rows, "b")) == ["STALE"] * 4
    assert run.store.run(operations.cut(rows, "", max_attempts=1)) == ["STALE"] * 4
    assert fail(run, "b", tasks) == ["STALE"] * 4
    assert run.submit(tasks[:1], "b") == ["STALE"]

    assert run.beat(tasks[0], 0, 1, key="a") == ("OK", 1), "to its own it is as it was"
    assert run.submit(tasks, "a") == ["OK"] * 4
    assert run.submit(tasks, "b") == ["STALE"] * 4
    assert run.submit(tasks, "a") == ["DUP"] * 4


def test_the_fence_of_a_lease_that_was_taken_away_cannot_be_guessed(run: RunInStore) -> None:
    run.create(1)
    tasks = lease(run, "a")
    shared = run.store.run(operations.share("b", 1, 100, still_ms=0, token_ms=1))
    suspended = run.store.run(operations.suspend("a", "why"))
    assert sorted(shared + suspended) == [task.task_id for task in tasks]

    for more in (0, 1, 2):
        guessed = [task._replace(fence=task.fence + more) for task in tasks]
        assert run.submit(guessed, "a") == ["STALE"] * 4


def test_an_actor_that_is_granted_nothing_takes_nothing_from_others(run: RunInStore) -> None:
    """Its weights are of a lineage that the store does not know."""
    run.create(1)
    tasks = lease(run, "a")

    assert run.store.run(operations.share("b", run.lineage + 1, 100, still_ms=0, token_ms=1)) == []
    assert run.submit(tasks, "a") == ["OK"] * 4


def test_a_lone_key_shares_half_and_an_only_lease_is_nobody_elses(run: RunInStore) -> None:
    run.create(1)
    (task, *_) = lease(run, "a")
    assert len(run.store.run(operations.share("b", 1, 100, still_ms=0, token_ms=1))) == 2
    run.submit([t for t in lease(run, "a") if t.task_id != task.task_id], "a")


def test_keys_of_one_enrolment_share_as_one_holder_and_among_themselves(run: RunInStore) -> None:
    run.create(4)
    for name in ("e~1", "e~2", "e~3", "e~4"):
        lease(run, name, 4)

    def gets(name: str, n: int = 100) -> int:
        given = run.store.run(operations.share(name, run.lineage, n, still_ms=0, token_ms=1))
        assert {task.task_id for task in lease(run, name)} == set(given)
        return len(given)

    assert gets("b") == 8, "half of 16, not a fifth: of the keys e~3 and e~4"
    assert gets("c") == 2, "an even share is 6 of 16, and b, like e, has 8"
    assert gets("e~5") == 1, "e has its share: e~1 and e~2 keep 3 of 8"
    assert gets("f~1", 1) == 1, "an even share is 4 of 16, and e has 8"
    assert gets("f~2") == 3, "f has 1 of its 4"
    assert gets("f~3") == 1, "now it has all: of f~2"


def test_keys_of_one_enrolment_are_one_holder_when_they_fail(run: RunInStore) -> None:
    run.create(2)
    lease(run, "b", 4)
    for i in range(8):
        fail(run, f"e~{i}", lease(run, f"e~{i}", 1))
        assert run.stats().dead == 0, i

    fail(run, "e~8", lease(run, "e~8", 1))

    assert run.stats().dead == 1
    assert run.redis.zcard(f"{run.prefix}:holders") == 2
    assert run.redis.zcard(f"{run.prefix}:deaths") == 0, "one holder's word"


def test_where_all_keys_are_of_one_enrolment_a_task_fails_with_two_of_them(run: RunInStore) -> None:
    run.create(2)
    for key in ("e~1", "e~1", "e~1", "e~2"):
        assert run.stats().dead == 0
        fail(run, key, lease(run, key, 1))

    assert run.stats().dead == 1
    assert run.redis.zcard(f"{run.prefix}:deaths") == 1


def test_an_enrolment_is_suspended_with_all_its_keys_and_a_key_alone(run: RunInStore) -> None:
    run.create(3)
    ids = {key: [t.task_id for t in lease(run, key, 4)] for key in ("e~1", "e~2", "b")}

    assert run.store.run(operations.suspend("e~1", "why")) == ids["e~1"]
    assert run.store.run(operations.suspend("e", "why")) == ids["e~2"]
    closed = run.store.run(operations.closed())
    assert [closed.has(key) for key in ("e~1", "e~3", "b")] == [True, True, False]


@pytest.mark.parametrize("kind", ["data", "infrastructure"])
def test_one_of_several_keys_cannot_kill_a_task_in_a_few_attempts(
    run: RunInStore, kind: str
) -> None:
    run.create(2)
    others = lease(run, "b", 4)
    for _ in range(8):
        fail(run, "a", lease(run, "a", 1), kind)
        assert run.stats().dead == 0

    fail(run, "a", lease(run, "a", 1), kind)

    assert run.stats().dead == 1, "but for ever it must not live"
    assert run.store.run(operations.closed()).paused == ""
    assert len(others) == 4


def test_a_task_that_fails_with_two_keys_dies_at_its_limit(run: RunInStore) -> None:
    run.create(1)
    for key in "aab":
        assert run.stats().dead == 0
        fail(run, key, lease(run, key, 1))

    assert run.stats().dead == 1


@pytest.mark.parametrize("keys", ["abc", "aabb", "aabc", "aaaaaaaab"])
def test_of_three_keys_two_failures_are_others_or_it_may_be_one_keys_fault(
    run: RunInStore, keys: str
) -> None:
    run.create(2)
    lease(run, "b", 4)
    lease(run, "c", 1)
    run.submit(lease(run, "c", 3), "c")
    run.store.run(operations.suspend("c", "its task is free again"))
    run.store.run(operations.resume())

    for key in keys:
        assert run.stats().dead == 0, key
        fail(run, key, lease(run, key, 1))

    assert run.stats().dead == 1
    assert run.redis.zcard(f"{run.prefix}:deaths") == (keys != "aaaaaaaab")


def test_failures_and_lost_leases_are_judged_apart(run: RunInStore) -> None:
    run.create(2)
    lease(run, "b", 4)

    for key in ("liar", "b", "liar", "b", "liar", "liar"):
        if key == "b":
            run.expire(lease(run, key, 1))
        else:
            fail(run, key, lease(run, key, 1))
        assert run.stats().dead == 0


@pytest.mark.parametrize("kind", ["data", "infrastructure"])
def test_one_liar_beside_two_others_cannot_pause_the_run_with_their_help(
    run: RunInStore, kind: str
) -> None:
    """Each task fails with an honest actor once, by bad luck or by what the liar had stored."""
    run.create(12)
    for key in ("b", "c"):
        run.submit(lease(run, key, 4), key)
    for _ in range(12):
        for key in ("liar", "liar", "b"):
            fail(run, key, lease(run, key, 1), kind)
        run.submit(lease(run, "b", 1), "b")

    assert run.store.run(operations.closed()).paused == ""
    assert run.stats().dead == 0


def test_a_suspended_key_loses_its_leases_and_each_time_is_out_for_longer(run: RunInStore) -> None:
    run.create(2)
    tasks = lease(run, "a", 4)
    kept = lease(run, "b", 4)

    assert sorted(run.store.run(operations.suspend("a", "why"))) == [0, 1, 2, 3]
    assert run.submit(tasks, "a") == ["STALE"] * 4
    assert run.submit(kept, "b") == ["OK"] * 4
    assert 50 < run.store.run(operations.closed()).keys["a"].left_s <= 60
    run.store.run(operations.suspend("a", "why"))
    assert 110 < run.store.run(operations.closed()).keys["a"].left_s <= 120
    for _ in range(9):
        run.store.run(operations.suspend("a", "the last"))
    left_s, why = run.store.run(operations.closed()).keys["a"]
    assert (3500 < left_s <= 3600, why) == (True, "the last")

    run.redis.hset(f"{run.prefix}:suspended", "a", "1 9 long ago")
    assert run.store.run(operations.closed()).keys == {}
    for _ in range(3):
        run.store.run(operations.suspend("a", "brief", is_brief=True))
        assert run.store.run(operations.closed()).keys["a"].left_s <= 10, "brief ones do not grow"
    run.store.run(operations.suspend("a", "why"))
    assert run.store.run(operations.closed()).keys["a"].left_s <= 60, "an hour of peace counts"

    run.redis.hset(f"{run.prefix}:suspended", "gone", "1 9 long ago")
    run.store.run(operations.suspend("b", "why"))
    assert set(run.redis.hkeys(f"{run.prefix}:suspended")) == {b"a", b"b"}, "old ones are forgotten"


def test_a_brief_suspension_shortens_no_long_one(run: RunInStore) -> None:
    run.store.run(operations.suspend("a", "many failures"))
    (ends,) = [int(v.split()[0]) for v in run.redis.hvals(f"{run.prefix}:suspended")]

    run.store.run(operations.suspend("a", "a few more", is_brief=True))

    assert run.redis.hget(f"{run.prefix}:suspended", "a") == f"{ends} 1 a few more".encode()


def test_leasing_pauses_when_more_than_one_in_a_hundred_recent_tasks_died(run: RunInStore) -> None:
    run.create(100)

    def kill(deaths: int) -> None:
        for _ in range(3 * deaths):
            fail(run, "a", lease(run, "a", 1))

    kill(10)
    assert run.stats().dead == 10
    assert run.store.run(operations.closed()).paused == ""
    oldest = zset(run.redis, f"{run.prefix}:deaths")[0]
    run.redis.zadd(f"{run.prefix}:deaths", {str(oldest): -250})  # units of four tasks
    kill(1)
    assert run.stats().dead == 11
    assert run.store.run(operations.closed()).paused == ""

    held = lease(run, "a")
    fail(run, "a", held)
    kill(1)
    closed = run.store.run(operations.closed())
    assert closed.paused.startswith("11 of the last 1000 tasks died, 11 of them of: why; 11 in")
    assert lease(run, "a") == []
    dead = run.stats().dead
    fail(run, "a", held)
    assert run.stats().dead == dead == 12, "what is leased still need not die with the others"

    assert run.store.run(operations.resume())
    assert lease(run, "a") != []
    assert not run.store.run(operations.resume())


def test_deaths_before_another_holder_came_do_not_pause_the_run_again(run: RunInStore) -> None:
    run.create(100)
    while not run.store.run(operations.closed()).paused:  # alone: its failures pause the run
        fail(run, "a", lease(run, "a", 1))

    assert lease(run, "b", 4), "another holder ends the pause"
    assert run.redis.exists(f"{run.prefix}:deaths") == 0
    assert run.store.run(operations.closed()).paused == ""


def test_a_pause_names_a_reason_although_each_death_has_another(run: RunInStore) -> None:
    run.create(100)
    for number in range(11):
        for _ in range(3):
            rows = [(x.task_id, x.fence, "data", f"reason {number}") for x in lease(run, "a", 1)]
            call = operations.fail("a", max_attempts=3, max_data_failures=3, failures=rows)
            run.store.run(call)

    paused = run.store.run(operations.closed()).paused
    assert paused.startswith("11 of the last 1000 tasks died, 1 of them of: reason ")


def test_a_pause_counts_exceptions_of_one_line_as_one_reason(run: RunInStore) -> None:
    run.create(100)
    whys = [f"reward raised KeyError: {n}, at /a/r.py:{3 + n % 4 // 3}: `f()`" for n in range(11)]
    for why in whys:
        for _ in range(3):
            rows = [(x.task_id, x.fence, "data", why) for x in lease(run, "a", 1)]
            call = operations.fail("a", max_attempts=3, max_data_failures=3, failures=rows)
            run.store.run(call)

    paused = run.store.run(operations.closed()).paused
    assert re.match(
        r"11 of the last 1000 tasks died, 9 of them of: reward raised KeyError: \d+, at "
        r"/a/r\.py:3: `f\(\)`; 11 in the hands of ",
        paused,
    ), paused
