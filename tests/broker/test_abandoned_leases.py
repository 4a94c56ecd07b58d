"""Leases granted to a call that has given up."""

from __future__ import annotations

import asyncio

import pytest

from broker.client.abandoned_leases import AbandonedLeases
from broker.client.client import BrokerClient
from broker.protocol.messages import (
    Lease,
    LeaseReply,
    LeaseRequest,
    Refusal,
    ReleaseRequest,
    TaskSpec,
    Verdicts,
)
from broker.transport.keys import KeyPair
from buffer.record.episode import PolicyVersion

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


def test_a_refusal_is_no_answer_to_the_copies_before_it() -> None:
    async def story() -> None:
        abandoned = AbandonedLeases(Released(), max_calls=4)
        answer: asyncio.Future[object | None] = asyncio.get_running_loop().create_future()
        answer.set_result(Refusal("store", "the store is away"))

        abandoned.add(5, answer)

        assert abandoned.calls == (5,)

    asyncio.run(story())


@pytest.mark.parametrize(("copies", "remembered"), [(1, 0), (2, 1)])
def test_an_empty_answer_to_a_second_copy_says_nothing_of_the_first(
    monkeypatch: pytest.MonkeyPatch, copies: int, remembered: int
) -> None:
    answers = [None] * (copies - 1) + [LeaseReply("WAIT", (), None)]

    async def answer(*_: object) -> object:
        return answers.pop(0)

    async def story() -> None:
        key = KeyPair(b"p" * 40, b"s" * 40)
        client = BrokerClient(
            "tcp://127.0.0.1:1", server_key=key.public, keys=key, run="r", incarnation="actor-1"
        )
        monkeypatch.setattr(client, "_try", answer)
        monkeypatch.setattr(client, "_start", lambda: None)
        try:
            await client.lease(LeaseRequest(1, PolicyVersion(1, 0)))
            assert len(client._abandoned.calls) == remembered
        finally:
            await client.close()

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
