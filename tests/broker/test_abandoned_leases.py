"""Leases granted to a call that has given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import pytest

from broker import client as client_module
from broker.client import AbandonedLeases, BrokerClient
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
from configs.errors import DeadlineError
from tests.simulation.event_loop import VirtualLoop

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
        monkeypatch.setattr(client, "_send_once", answer)
        monkeypatch.setattr(client, "_start_receiving", lambda: None)
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


class Line:
    """Stands in for the client's connection: it takes everything, and nothing is answered."""

    is_busy = False
    """The broker answers other calls."""
    sent_at: ClassVar[list[float]] = []

    def __init__(self, *_: object, **__: object) -> None:
        self.description = "nowhere"

    @property
    def received_at(self) -> float:
        return time.monotonic() if self.is_busy else 0.0

    async def send(self, _frame: bytes) -> None:
        self.sent_at.append(time.monotonic())

    def learn(self, _endpoints: Sequence[str]) -> None:
        """Nobody names another broker."""

    def switch_if_silent(self, _asked_at: float, _broker_wait_s: float) -> None:
        """There is no other."""

    def close(self) -> None:
        """There is nothing to close."""


@pytest.mark.parametrize("is_busy", [False, True], ids=["silent", "answers others"])
@pytest.mark.parametrize("lease_timeout_s", [5.0, 15.0])
def test_a_grant_whose_answer_was_lost_is_asked_for_before_it_expires(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool, lease_timeout_s: float
) -> None:
    """Whichever of the copies was granted, the next is at the broker in half of a lease's time."""

    async def story() -> None:
        key = KeyPair(b"p" * 40, b"s" * 40)
        client = BrokerClient("nowhere", server_key=key.public, keys=key, run="r", incarnation="a")
        monkeypatch.setattr(client, "_start_receiving", lambda: None)
        client._long_poll_s, client._lease_timeout_s = 2.0, lease_timeout_s
        with pytest.raises(DeadlineError):
            await client.lease(LeaseRequest(1, PolicyVersion(1, 0)), deadline_s=60)
        await client.close()

    loop = VirtualLoop()
    monkeypatch.setattr(Line, "is_busy", is_busy)
    monkeypatch.setattr(Line, "sent_at", [])
    monkeypatch.setattr(client_module, "Connection", Line)
    monkeypatch.setattr(time, "monotonic", loop.time)
    try:
        loop.run_until_complete(story())
    finally:
        loop.close()

    pauses = [after - before for before, after in pairwise(Line.sent_at)]
    assert len(pauses) > 5
    assert max(pauses) <= lease_timeout_s / 2 + 0.01
