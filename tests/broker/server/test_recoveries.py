"""Times from an actor's last sign of life to its work in other hands."""

from __future__ import annotations

import asyncio
from typing import Any

from broker.protocol.codec import WIRE_VERSION, Envelope
from broker.protocol.messages import Bye, LeaseReply, LeaseRequest, ReleaseRequest
from broker.server.dispatch import assemble
from broker.server.liveness import MAX_TASKS, Liveness, Recoveries
from buffer.store import AsyncStore
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.ring import FIRST, RUN, begin, hello, settings_with


class Table:
    """Two actors and what is counted of them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.peers = Liveness(
            heartbeat_timeout_s=6, max_actors=9, max_actors_per_key=1, clock=self.clock
        )
        self.recoveries = Recoveries(self.peers)
        self.a, self.b = (
            self.peers.admit(hello(name), name, name, name.encode()) for name in ("a", "b")
        )

    def hear(self, name: str) -> None:
        assert self.peers.observe(name, name, name.encode()) is not None


def test_an_expired_lease_counts_from_the_last_sign_of_life() -> None:
    table = Table()
    table.recoveries.granted(table.a, [1, 2])
    table.clock.now += 5
    table.hear("a")

    table.clock.now += 15
    table.recoveries.expired([1])
    table.clock.now += 3
    table.recoveries.granted(table.b, [1])

    assert sum(table.recoveries.requeues.counts) == 1
    assert table.recoveries.requeues.total == 15
    assert sum(table.recoveries.recoveries.counts) == 1
    assert table.recoveries.recoveries.total == 18


def test_a_task_of_a_silent_actor_is_recovered_without_having_expired() -> None:
    table = Table()
    table.recoveries.granted(table.a, [1])
    table.clock.now += 7  # over heartbeat_timeout_s
    table.hear("b")

    table.recoveries.granted(table.b, [1])

    assert table.recoveries.recoveries.total == 7
    assert sum(table.recoveries.requeues.counts) == 0


def test_a_lease_that_expired_counts_although_its_actor_came_back() -> None:
    table = Table()
    table.recoveries.granted(table.a, [1])
    table.clock.now += 20
    table.recoveries.expired([1])
    table.hear("a")

    table.recoveries.granted(table.b, [1])

    assert table.recoveries.recoveries.total == 20


def test_an_actor_that_another_life_has_replaced_has_left() -> None:
    table = Table()
    table.recoveries.granted(table.a, [1])
    table.clock.now += 3
    table.peers.forget("a", "a")
    again = table.peers.admit(hello("a2"), "a", "a", b"a2")

    table.recoveries.granted(again, [1])

    assert table.recoveries.recoveries.total == 3


def move(table: Table) -> None:
    """Task 1 goes from a to b two seconds after a was heard, before anybody misses it."""
    table.recoveries.granted(table.a, [1])
    table.clock.now += 2
    table.recoveries.granted(table.b, [1])


def test_what_a_live_actor_gives_back_is_no_recovery() -> None:
    table = Table()
    move(table)
    table.clock.now += 1
    table.hear("a")
    table.clock.now += 7  # over heartbeat_timeout_s: silent, but long after

    table.recoveries.judge_moves()

    assert sum(table.recoveries.recoveries.counts) == 0


def test_what_was_shared_before_its_actor_was_missed_is_a_recovery_once_that_is() -> None:
    table = Table()
    move(table)

    table.clock.now += 4
    table.recoveries.judge_moves()
    assert sum(table.recoveries.recoveries.counts) == 0  # it may be heard yet

    table.clock.now += 1
    table.recoveries.judge_moves()
    table.recoveries.judge_moves()
    assert sum(table.recoveries.recoveries.counts) == 1
    assert table.recoveries.recoveries.total == 2


def test_what_an_actor_gave_back_as_it_left_is_no_recovery() -> None:
    table = Table()
    table.recoveries.granted(table.a, [1, 2])
    table.recoveries.granted(table.b, [1])
    table.peers.end_session("a", "a")

    table.recoveries.granted(table.b, [2])
    table.recoveries.judge_moves()

    assert sum(table.recoveries.recoveries.counts) == 0


def test_an_actor_that_says_bye_is_not_missed(redis_url: str) -> None:
    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        parts = assemble(settings_with(), store, audit_file=None)
        await begin(store, groups=1)

        async def say(name: str, *messages: Any) -> object:
            for seq, message in enumerate(messages):
                envelope = Envelope(WIRE_VERSION, RUN, name, seq, message)
                reply = await parts.service.answer(envelope, name, name, name.encode())
            return reply

        leased = await say("a", hello("a"), LeaseRequest(2, FIRST))
        assert isinstance(leased, LeaseReply)
        tasks = tuple((lease.task_id, lease.fence) for lease in leased.leases)
        await say("a", ReleaseRequest(tasks), Bye())

        again = await say("b", hello("b"), LeaseRequest(2, FIRST))
        assert isinstance(again, LeaseReply)
        assert [lease.task_id for lease in again.leases] == [task_id for task_id, _ in tasks]
        assert sum(parts.leasing.recoveries.recoveries.counts) == 0
        await store.close()

    asyncio.run(story())


def test_holders_of_old_tasks_are_forgotten() -> None:
    table = Table()
    table.recoveries.granted(table.a, range(MAX_TASKS + 1))

    table.recoveries.expired([0, 1])

    assert sum(table.recoveries.requeues.counts) == 1
