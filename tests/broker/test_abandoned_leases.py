"""Leases granted to a call that has given up."""

from __future__ import annotations

import asyncio

from broker.client.abandoned_leases import AbandonedLeases
from broker.protocol.messages import Lease, LeaseReply, ReleaseRequest, TaskSpec, Verdicts

GRANT = LeaseReply(
    status="OK",
    leases=(Lease(7, 3, TaskSpec(0, index=0, seed=0, purpose="train", temperature=1.0), 0, ()),),
    retry_after_s=0.0,
    publication=None,
)


class Released:
    """Stands in for the client's `release`; counts what is given back, in its own time."""

    def __init__(self) -> None:
        self.task_ids: list[int] = []

    async def __call__(self, request: ReleaseRequest, *, deadline_s: float) -> Verdicts:
        await asyncio.sleep(0.01)
        self.task_ids += [task_id for task_id, _ in request.tasks]
        return Verdicts((), None)


def test_a_reply_that_nobody_read_before_the_call_ended_is_given_back() -> None:
    async def story() -> None:
        released = Released()
        abandoned = AbandonedLeases(released, max_calls=4)
        answer: asyncio.Future[object | None] = asyncio.get_running_loop().create_future()
        answer.set_result(GRANT)

        abandoned.add(5, answer)
        await abandoned.wait_released(5.0)

        assert released.task_ids == [7]

    asyncio.run(story())


def test_a_reply_that_comes_after_the_call_ended_is_given_back_once() -> None:
    async def story() -> None:
        released = Released()
        abandoned = AbandonedLeases(released, max_calls=4)
        abandoned.add(5, asyncio.get_running_loop().create_future())

        abandoned.on_reply(5, GRANT)
        abandoned.on_reply(5, GRANT)  # the reply to a second copy of the request
        await abandoned.wait_released(5.0)

        assert released.task_ids == [7]

    asyncio.run(story())


def test_other_replies_that_nobody_waits_for_are_passed_over() -> None:
    async def story() -> None:
        released = Released()
        abandoned = AbandonedLeases(released, max_calls=4)
        abandoned.add(5, None)

        abandoned.on_reply(6, GRANT)
        abandoned.on_reply(5, Verdicts((), None))
        await abandoned.wait_released(5.0)

        assert released.task_ids == []

    asyncio.run(story())
