"""Bursts: requests beyond what a broker holds at once are left unread or refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from broker.protocol.codec import encode
from broker.protocol.messages import BeatRequest, LeaseRequest, Verdicts
from broker.server import flow_control
from broker.server.flow_control import RequestLimiter
from broker.server.service import Service
from tests.broker.support.limits import has_room
from tests.broker.support.ring import FIRST, RUN, begin, hello, ring

BURST = 40
ROOM = 4


def test_a_burst_is_read_only_as_far_as_there_is_room(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = asyncio.Event()
    entered: list[int] = []

    async def answer(_service: Service, envelope: Any, _key: str) -> Verdicts:
        entered.append(envelope.seq)
        await opened.wait()
        return Verdicts((), None)

    async def story() -> None:
        async with ring(redis_url, keys) as here, here.raw_socket() as socket:
            monkeypatch.setattr(Service, "answer", answer)
            for seq in range(BURST):
                beat = encode(BeatRequest((), FIRST, {}), run=RUN, incarnation="a", seq=seq)
                await socket.send(beat)
            time.sleep(0.3)  # noqa: ASYNC251 - all of them are in the broker's queue before it reads
            await asyncio.sleep(0.3)
            assert entered == list(range(ROOM))

            opened.set()
            for _ in range(BURST):
                await asyncio.wait_for(socket.recv(), 5)
            assert entered == list(range(BURST))

    monkeypatch.setattr(flow_control, "MAX_REQUESTS", ROOM)
    asyncio.run(story())


def test_requests_that_wait_for_work_leave_room_for_others(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, long_poll_s=5.0) as here:
            await begin(here.store, groups=0)
            actors = [await here.actor(f"actor-{number}") for number in range(2 * ROOM)]
            parked = [asyncio.create_task(a.lease(LeaseRequest(2, FIRST))) for a in actors]
            await asyncio.sleep(0.3)

            late = here.client("late")
            await late.hello(hello("late"), deadline_s=2)

            assert not any(task.done() for task in parked)
            for task in parked:
                task.cancel()
            await asyncio.gather(*parked, return_exceptions=True)

    monkeypatch.setattr(flow_control, "MAX_REQUESTS", ROOM)
    asyncio.run(story())


def test_a_slot_is_released_once() -> None:
    async def story() -> None:
        limiter = RequestLimiter(max_message_bytes=100, max_peer_bytes=10**6)
        large, small = limiter.admit(350, b"a"), limiter.admit(60, b"a")
        assert large is not None and small is not None
        waiting = asyncio.create_task(limiter.wait_for_room())
        await asyncio.sleep(0)
        assert not waiting.done()

        small.release()
        small.release()  # the second time changes nothing
        await asyncio.wait_for(waiting, 1)
        limiter.admit(60, b"a")
        assert not await has_room(limiter)
        large.release()
        assert await has_room(limiter)

    asyncio.run(story())


def test_a_peer_over_its_share_is_refused_and_others_are_not() -> None:
    limiter = RequestLimiter(max_message_bytes=1000, max_peer_bytes=100)
    whole = limiter.admit(1000, b"greedy")  # a single message of any size is let in
    assert whole is not None

    assert limiter.admit(1, b"greedy") is None
    assert limiter.admit(60, b"other") is not None
    assert limiter.admit(60, b"other") is None
    assert limiter.admit(40, b"other") is not None
    whole.release()
    assert limiter.admit(60, b"greedy") is not None


def test_a_peer_has_at_most_its_number_of_requests_at_the_broker() -> None:
    limiter = RequestLimiter(max_message_bytes=1000, max_peer_bytes=10**6)
    slots = [limiter.admit(1, b"greedy") for _ in range(flow_control.MAX_REQUESTS_PER_PEER)]

    assert None not in slots
    assert limiter.admit(1, b"greedy") is None
    assert asyncio.run(has_room(limiter))
    assert limiter.admit(1, b"other") is not None
