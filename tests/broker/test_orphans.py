"""Leases that are granted to a call which has given up."""

from __future__ import annotations

import asyncio

from broker.client.abandoned_leases import Orphans
from broker.protocol.messages import Lease, LeaseReply, TaskSpec, Verdicts

GRANT = LeaseReply(
    status="OK",
    leases=(Lease(7, 3, TaskSpec(0, index=0, seed=0, purpose="train", temperature=1.0), 0, ()),),
    retry_after_s=0.0,
    publication=None,
)


class Released:
    """Counts what is given back, in its own time."""

    def __init__(self) -> None:
        self.task_ids: list[int] = []

    async def __call__(self, reply: LeaseReply) -> None:
        await asyncio.sleep(0.01)
        self.task_ids += [lease.task_id for lease in reply.leases]


def test_a_reply_that_nobody_read_before_the_call_ended_is_given_back() -> None:
    async def story() -> None:
        released = Released()
        orphans = Orphans(released, most=4)
        answer: asyncio.Future[object | None] = asyncio.get_running_loop().create_future()
        answer.set_result(GRANT)

        orphans.abandon(5, answer)
        await orphans.settle(5.0)

        assert released.task_ids == [7]

    asyncio.run(story())


def test_a_reply_that_comes_after_the_call_ended_is_given_back_once() -> None:
    async def story() -> None:
        released = Released()
        orphans = Orphans(released, most=4)
        orphans.abandon(5, asyncio.get_running_loop().create_future())

        orphans.take(5, GRANT)
        orphans.take(5, GRANT)  # the reply to a second copy of the request
        await orphans.settle(5.0)

        assert released.task_ids == [7]

    asyncio.run(story())


def test_other_replies_that_nobody_waits_for_are_passed_over() -> None:
    async def story() -> None:
        released = Released()
        orphans = Orphans(released, most=4)
        orphans.abandon(5, None)

        orphans.take(6, GRANT)
        orphans.take(5, Verdicts((), None))
        await orphans.settle(5.0)

        assert released.task_ids == []

    asyncio.run(story())
