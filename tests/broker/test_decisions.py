"""The pure classes: liveness, grace period, request limiter, and the queue of waiting requests."""

from __future__ import annotations

import asyncio

import pytest

from broker.server import flow_control
from broker.server.flow_control import RequestLimiter
from broker.server.leasing import GracePeriod, WaitQueue
from broker.server.liveness import FORGET_AFTER, Liveness
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.ring import hello
from tests.waiting import until

ROUTE = b"connection"


def table(clock: FakeClock, max_actors: int = 2, max_actors_per_key: int = 2) -> Liveness:
    return Liveness(
        heartbeat_timeout_s=6.0,
        max_actors=max_actors,
        max_actors_per_key=max_actors_per_key,
        clock=clock,
    )


def test_a_silent_actor_becomes_suspect_and_any_message_revives_it() -> None:
    clock = FakeClock()
    peers = table(clock)
    peer = peers.admit(hello("a"), "key", "tag", ROUTE)

    clock.now += 6.0
    assert not peers.is_suspect(peer)
    clock.now += 0.1
    assert peers.is_suspect(peer)
    assert peers.observe("a", "key", ROUTE) is peer
    assert not peers.is_suspect(peer)


def test_an_actor_is_reported_again_when_it_was_heard_again() -> None:
    peers = table(FakeClock())
    peer = peers.admit(hello("a"), "key", "tag", ROUTE)
    peer.is_unreported = False  # as the broker leaves it when it has told the store

    assert peers.observe("b", "key", ROUTE) is None
    assert not peer.is_unreported
    peers.observe("a", "key", ROUTE)
    assert peer.is_unreported


def test_a_silent_actor_that_says_hello_again_is_there_again() -> None:
    clock = FakeClock()
    peers = table(clock)
    peers.admit(hello("a"), "key", "tag", ROUTE)
    clock.now += 6.1

    peer = peers.admit(hello("a"), "key", "tag", b"another connection")

    assert not peers.is_suspect(peer)
    assert peer.route == b"another connection"


def test_a_long_silent_actor_is_forgotten_and_has_to_say_hello() -> None:
    clock = FakeClock()
    peers = table(clock)
    peer = peers.admit(hello("a"), "key", "tag", ROUTE)

    clock.now += 6.0 * FORGET_AFTER + 1
    assert peers.expire() == ["a"]
    assert peers.observe("a", "key", ROUTE) is None
    assert peers.is_suspect(peer)


def test_only_its_own_key_speaks_for_an_incarnation() -> None:
    peers = table(FakeClock())
    first = peers.admit(hello("a"), "key", "tag", ROUTE)

    assert peers.observe("a", "other", ROUTE) is None
    other = peers.admit(hello("a"), "other", "tag of other", ROUTE)
    assert peers.observe("a", "key", ROUTE) is first
    assert peers.observe("a", "other", ROUTE) is other
    assert peers.named("a") == [first, other]
    peers.forget("a", "other")
    assert peers.is_suspect(other)
    assert not peers.is_suspect(first)


def test_a_place_is_left_by_who_is_silent_or_has_no_connection() -> None:
    clock = FakeClock()
    peers = table(clock)
    peer = peers.admit(hello("a"), "key", "tag", ROUTE)

    assert peers.observe("a", "key", b"another") is None
    assert peers.is_elsewhere("a", "key", b"another")
    assert not peers.is_elsewhere("a", "other", b"another")
    assert not peers.is_elsewhere("a", "key", ROUTE)
    assert peers.gone_of("key") == []
    peers.has_route = lambda route: route != ROUTE
    assert not peers.is_elsewhere("a", "key", b"another")
    assert (peers.gone_of("key"), peers.gone_of("other")) == ([peer], [])
    peers.has_route = lambda _route: True
    clock.now += 6.1
    assert peers.gone_of("key") == [peer]


def test_a_full_table_takes_a_known_actor_again_and_no_new_one() -> None:
    peers = table(FakeClock(), max_actors=1)
    peer = peers.admit(hello("a"), "key", "tag", ROUTE)

    assert peers.exceeded_limit("a", "key") is None
    assert peers.exceeded_limit("b", "key") == "broker.max_actors = 1"
    assert peers.admit(hello("a", capacity=3), "key", "tag", ROUTE) is peer
    assert peer.hello.capacity == 3
    peers.forget("a", "key")
    assert peers.exceeded_limit("b", "key") is None


def test_actors_of_other_brokers_count_and_one_that_comes_from_there_is_not_one_too_many() -> None:
    peers = table(FakeClock(), max_actors=3)
    peers.admit(hello("a"), "key-a", "tag-a", ROUTE)
    peers.in_store = frozenset({"a\ntag-a", "b\ntag-b", "c\ntag-c"})

    assert peers.exceeded_limit("d", "key-d", "tag-d") == "broker.max_actors = 3"
    assert peers.exceeded_limit("b", "key-b", "tag-b") is None
    assert peers.exceeded_limit("b", "key-d", "tag-d") == "broker.max_actors = 3"
    peers.admit(hello("b"), "key-b", "tag-b", ROUTE)
    peers.in_store = frozenset({"a\ntag-a", "b\ntag-b"})

    assert peers.exceeded_limit("d", "key-d", "tag-d") is None


def test_one_key_has_at_most_its_number_of_actors() -> None:
    peers = table(FakeClock(), max_actors=9, max_actors_per_key=1)
    peers.admit(hello("a"), "key", "tag", ROUTE)

    assert peers.exceeded_limit("b", "key") == "broker.max_actors_per_key = 1"
    assert peers.exceeded_limit("a", "key") is None
    assert peers.exceeded_limit("b", "other") is None
    assert peers.forget_key("key") == ["a"]
    assert peers.exceeded_limit("b", "key") is None


def test_nothing_is_reaped_within_the_grace_after_start_or_outage() -> None:
    clock = FakeClock()
    grace = GracePeriod(grace_s=15.0, clock=clock)

    def passes(seconds: int) -> bool:
        for _ in range(seconds):
            clock.now += 1.0
            last = grace.is_over()
        return last

    assert not passes(14)
    assert passes(1)
    grace.start()
    assert not passes(14)
    assert passes(1)


def test_nothing_is_reaped_right_after_the_process_was_stopped() -> None:
    clock = FakeClock()
    grace = GracePeriod(grace_s=15.0, clock=clock)
    for _ in range(20):
        clock.now += 1.0
        grace.is_over()
    assert grace.is_over()

    clock.now += 30.0
    assert not grace.is_over()
    clock.now += 5.0
    assert not grace.is_over()


def limiter(max_key_bytes: int = 10**6, max_key_requests: int = 10**6) -> RequestLimiter:
    return RequestLimiter(
        max_message_bytes=100, max_key_bytes=max_key_bytes, max_key_requests=max_key_requests
    )


def admits(limits: RequestLimiter, num_bytes: int, tag: str, *, is_prompt: bool = False) -> bool:
    return limits.admit(num_bytes, tag, is_prompt=is_prompt) is not None


def test_a_holder_has_no_more_than_it_leaves_to_others() -> None:
    limits = limiter()
    assert admits(limits, 100, "a")
    assert not admits(limits, 101, "a"), "300 is the room of work"
    assert admits(limits, 50, "a")
    assert not admits(limits, 1, "a")
    assert admits(limits, 75, "b"), "half of what is left"
    assert not admits(limits, 1, "b")
    assert admits(limits, 37, "c")


def test_however_many_keys_a_holder_has_there_is_room_for_another() -> None:
    limits = limiter()
    taken = sum(admits(limits, 10, f"e~{n}") for n in range(50))
    assert taken == 15
    assert admits(limits, 50, "honest")
    assert admits(limits, 25, "e2~1")

    few = limiter()
    while admits(few, 1, "e~1") or admits(few, 1, "e~2"):
        pass
    assert admits(few, 1, "honest")


def test_heartbeats_have_room_of_their_own_and_are_bounded_in_it() -> None:
    limits = limiter()
    while admits(limits, 10, "a"):
        pass
    assert admits(limits, 50, "a", is_prompt=True)
    assert not admits(limits, 1, "a", is_prompt=True)
    assert admits(limits, 25, "b", is_prompt=True)
    assert not admits(limits, 1, "b", is_prompt=True)


def test_requests_are_bounded_as_bytes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "MAX_REQUESTS", 10)
    limits = limiter()
    assert [admits(limits, 0, "a") for _ in range(6)] == [True] * 5 + [False]
    assert [admits(limits, 0, "b") for _ in range(4)] == [True] * 3 + [False]
    assert [admits(limits, 0, "a", is_prompt=True) for _ in range(6)] == [True] * 5 + [False]


def test_the_queue_moves_in_order_and_forgets_calls_that_left() -> None:
    async def story() -> None:
        queue, served = WaitQueue(), []

        async def wait(name: str, timeout_s: float) -> None:
            await queue.wait(timeout_s)
            served.append(name)

        tasks = [asyncio.create_task(wait(name, 5.0)) for name in "abc"]
        impatient = asyncio.create_task(wait("impatient", 0.01))
        left = asyncio.create_task(wait("left", 5.0))
        await until(lambda: served)  # all wait since
        left.cancel()
        await asyncio.gather(impatient, left, return_exceptions=True)
        assert (served, len(queue)) == (["impatient"], 3)

        queue.wake(2)
        await until(lambda: len(served) > 2)
        assert served == ["impatient", "a", "b"]
        queue.wake()
        await asyncio.gather(*tasks)
        assert served[-1] == "c"

    asyncio.run(story())


def test_a_slot_is_released_once() -> None:
    limits = limiter()
    large, small = (limits.admit(size, "a", is_prompt=False) for size in (100, 50))
    assert large is not None
    assert small is not None
    assert not admits(limits, 50, "a")

    small.release()
    small.release()  # the second time changes nothing
    assert admits(limits, 50, "a")
    assert not admits(limits, 50, "a")
    large.release()
    assert admits(limits, 100, "a")


def test_a_key_over_its_share_is_refused_and_others_are_not() -> None:
    limits = limiter(max_key_bytes=50)
    whole = limits.admit(100, "greedy", is_prompt=False)  # a single message of any size is let in
    assert whole is not None

    assert not admits(limits, 1, "greedy")
    assert not admits(limits, 1, "greedy", is_prompt=True)
    assert admits(limits, 30, "other")
    assert not admits(limits, 30, "other")
    assert admits(limits, 20, "other")
    whole.release()
    assert admits(limits, 30, "greedy")


def test_a_key_has_at_most_its_number_of_requests_at_the_broker() -> None:
    limits = limiter(max_key_requests=3)

    assert [admits(limits, 1, "e~1") for _ in range(4)] == [True] * 3 + [False]
    assert admits(limits, 1, "e~2")
