"""Lanes: heartbeats pass by work that waits, and work that would wait too long is refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from broker.protocol.codec import Header, decode, encode, header_of
from broker.protocol.messages import (
    BeatRequest,
    Bye,
    DrainRequest,
    LeaseRequest,
    Refusal,
    SubmitRequest,
    Verdicts,
)
from broker.server import lanes
from broker.server.flow_control import RequestSlot
from broker.server.lanes import PROMPT, PendingRequest, ReadingClock, RequestLane
from broker.server.liveness import Liveness
from broker.server.server import Broker
from broker.server.service import Service
from broker.transport.allow_list import AllowListEntry, Role
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.ring import FIRST, RUN, begin, hello, ring, until_parked
from tests.waiting import still_waits, until

BURST = 40
ROOM = 4
MEMBER = AllowListEntry("actor", Role.ACTOR, "tag")


class Traffic:
    """A lane and what became of the requests that were offered to it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.started: list[PendingRequest] = []
        self.shed: list[int] = []
        self.released: list[int] = []
        self.lane = RequestLane(
            self.started.append,
            lambda request: self.shed.append(request.header.seq),
            most_wait_s=1.5,
            clock=self.clock,
        )

    def offer(self, *numbers: int, member: AllowListEntry = MEMBER) -> None:
        for seq in numbers:
            slot = RequestSlot(lambda seq=seq: self.released.append(seq))  # type: ignore[misc]
            self.lane.offer(PendingRequest(b"route", None, Header(seq=seq), "key", member, slot))

    def finish(self, count: int) -> None:
        for request in self.started[-count:]:
            request.release()

    @property
    def seqs(self) -> list[int]:
        return [request.header.seq for request in self.started]


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    monkeypatch.setattr(lanes, "MAX_RUNNING", 2)
    monkeypatch.setattr(lanes, "MAX_WAITING", 3)
    return Traffic()


def test_a_lane_starts_requests_in_the_order_in_which_they_came(traffic: Traffic) -> None:
    traffic.offer(1, 2, 3, 4)
    assert traffic.seqs == [1, 2]

    traffic.started[1].release()
    traffic.started[1].release()  # the second time changes nothing
    assert traffic.seqs == [1, 2, 3]
    traffic.offer(5)
    traffic.finish(1)
    assert traffic.seqs == [1, 2, 3, 4]


def test_what_has_waited_too_long_is_shed_and_so_is_what_comes_behind_it(traffic: Traffic) -> None:
    traffic.offer(1, 2, 3)
    traffic.clock.now += 1.4
    traffic.offer(4)
    traffic.clock.now += 0.2

    traffic.offer(5)
    assert traffic.shed == [5]
    traffic.lane.advance()  # nobody has finished
    assert traffic.shed == [5, 3]
    traffic.finish(1)

    assert traffic.seqs == [1, 2, 4]


def test_holders_that_wait_have_their_turns_however_many_keys_one_has(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_WAITING", 99)
    keys = [AllowListEntry(f"fleet-{n}", Role.ACTOR, f"fleet~{n}", "fleet") for n in range(3)]
    for n, member in enumerate(keys):
        traffic.offer(*range(10 * n, 10 * n + 4), member=member)
    traffic.offer(90, 91)

    for _ in range(4):
        traffic.started[-1].release()

    assert traffic.seqs == [0, 1, 2, 90, 3, 91]


def test_only_whose_own_requests_wait_too_long_are_shed(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_WAITING", 99)
    other = AllowListEntry("other", Role.ACTOR, "other")
    traffic.offer(1, 2, 3, 4)
    traffic.clock.now += 1.6
    traffic.offer(5)
    traffic.offer(6, member=other)

    traffic.lane.advance()
    traffic.finish(1)

    assert traffic.shed == [5, 3, 4]
    assert traffic.seqs == [1, 2, 6]


def test_a_lane_holds_a_bounded_number_and_no_copies(traffic: Traffic) -> None:
    traffic.offer(1, 2, 3, 4, 3, 4)
    assert traffic.released == [3, 4]  # the copies

    traffic.offer(5, 6)

    assert traffic.shed == [6]
    assert traffic.seqs == [1, 2]


def test_signs_of_life_and_operators_are_no_work() -> None:
    requests = (BeatRequest((), FIRST), hello("a"), Bye(), DrainRequest("a"))
    work = (LeaseRequest(1, FIRST), SubmitRequest(()))

    def op(message: Any) -> str:
        return header_of(encode(message, run=RUN, incarnation="a" * 300, seq=2**63 - 1)).op

    assert {op(message) for message in requests} <= PROMPT
    assert not {op(message) for message in work} & PROMPT


def test_silence_is_counted_only_while_the_broker_reads() -> None:
    clock = FakeClock()
    reading = ReadingClock(clock)
    peers = Liveness(heartbeat_timeout_s=6, max_actors=2, max_actors_per_key=2, clock=reading)
    peer = peers.admit(hello("a"), "key", "tag", b"connection")

    clock.now += 60.0  # stopped
    reading.tick()
    assert not peers.is_suspect(peer)
    for _ in range(56):
        clock.now += 0.1
        reading.tick()

    assert peers.is_suspect(peer)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the requests that came to a lane."""
    found: list[int] = []
    offer = RequestLane.offer

    def counted(lane: RequestLane, request: PendingRequest) -> None:
        found.append(request.header.seq)
        offer(lane, request)

    monkeypatch.setattr(RequestLane, "offer", counted)
    return found


@pytest.mark.slow
def test_heartbeats_pass_by_work_that_the_store_holds_up(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch, offered: list[int]
) -> None:
    honest = Service.answer
    entered: list[int] = []

    async def answer(service: Service, envelope: Any, *sender: Any) -> object | None:
        if isinstance(envelope.message, SubmitRequest):
            entered.append(envelope.seq)
            await asyncio.Event().wait()
        return await honest(service, envelope, *sender)

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=0)
            actor = await here.actor()
            stuck = [asyncio.create_task(actor.submit(SubmitRequest(()))) for _ in range(40)]
            await until(lambda: len(offered) > len(stuck))  # and the HELLO

            await actor.beat(BeatRequest((), FIRST), deadline_s=2)
            other = here.client("other")
            await other.hello(hello("other"), deadline_s=2)

            assert len(entered) == ROOM
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

    monkeypatch.setattr(Service, "answer", answer)
    monkeypatch.setattr(lanes, "MAX_RUNNING", ROOM)
    asyncio.run(story())


@pytest.mark.slow
def test_what_is_refused_as_busy_comes_again_later_and_its_sender_counts_as_alive(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work alone, no heartbeat, at a store that does nothing: the sender is heard all the same."""
    opened = asyncio.Event()
    honest = Service.answer

    async def answer(service: Service, envelope: Any, *sender: Any) -> object | None:
        if isinstance(envelope.message, SubmitRequest):
            await opened.wait()
            return Verdicts((), None)
        return await honest(service, envelope, *sender)

    async def story() -> None:
        async with (
            ring(redis_url, keys, heartbeat_timeout_s=1.0) as here,
            here.raw_socket("raw") as raw,
        ):
            await begin(here.store, groups=0)
            await raw.send(encode(hello("raw"), run=RUN, incarnation="raw", seq=1))
            await asyncio.wait_for(raw.recv(), 5)

            async def submit(seq: int) -> None:
                await raw.send(encode(SubmitRequest(()), run=RUN, incarnation="raw", seq=seq))

            for seq in range(2, 20):
                await submit(seq)
                await asyncio.sleep(0.1)
            refusals = [decode(await raw.recv(), max_bytes=2**20) for _ in range(4)]

            assert all(isinstance(reply.message, Refusal) for reply in refusals)
            assert {reply.message.code for reply in refusals} == {"busy"}  # type: ignore[union-attr]
            assert refusals[0].message.retry_after_s == 0.25  # type: ignore[union-attr]
            peer = parts[0].peers.named("raw")[0]
            assert not parts[0].peers.is_suspect(peer)

            actor = await here.actor()
            late = asyncio.create_task(actor.submit(SubmitRequest(())))
            assert await still_waits(late, 0.3)
            began = time.monotonic()
            opened.set()
            await asyncio.wait_for(late, 5)  # it was refused, and comes again by itself
            assert time.monotonic() - began < 4

    parts: list[Any] = []
    made = Broker._dispatcher

    def dispatcher(broker: Broker, *arguments: Any) -> Any:
        parts.append(broker.parts)
        return made(broker, *arguments)

    monkeypatch.setattr(Broker, "_dispatcher", dispatcher)
    monkeypatch.setattr(Service, "answer", answer)
    monkeypatch.setattr(lanes, "MAX_RUNNING", 1)
    asyncio.run(story())


def test_a_burst_is_answered_a_few_at_a_time_in_order(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch, offered: list[int]
) -> None:
    opened = asyncio.Event()
    entered: list[int] = []

    async def answer(_service: Service, envelope: Any, *_sender: Any) -> Verdicts:
        entered.append(envelope.seq)
        await opened.wait()
        return Verdicts((), None)

    async def story() -> None:
        async with ring(redis_url, keys) as here, here.raw_socket() as socket:
            monkeypatch.setattr(Service, "answer", answer)
            for seq in range(BURST):
                beat = encode(BeatRequest((), FIRST), run=RUN, incarnation="a", seq=seq)
                await socket.send(beat)
            await until(lambda: len(offered) == BURST)
            assert entered == list(range(ROOM))

            opened.set()
            for _ in range(BURST):
                await asyncio.wait_for(socket.recv(), 5)
            assert entered == list(range(BURST))

    monkeypatch.setattr(lanes, "MAX_RUNNING", ROOM)
    asyncio.run(story())


def test_requests_that_wait_for_work_leave_room_for_others(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, long_poll_s=5.0) as here:
            await begin(here.store, groups=0)
            actors = [await here.actor(f"actor-{number}") for number in range(2 * ROOM)]
            parked = [asyncio.create_task(a.lease(LeaseRequest(2, FIRST))) for a in actors]
            await until_parked(here, 2 * ROOM)

            late = here.client("late")
            await late.hello(hello("late"), deadline_s=2)

            assert not any(task.done() for task in parked)
            for task in parked:
                task.cancel()
            await asyncio.gather(*parked, return_exceptions=True)

    monkeypatch.setattr(lanes, "MAX_RUNNING", ROOM)
    asyncio.run(story())
