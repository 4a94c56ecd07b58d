"""Messages that wait unread in the broker's own socket: nobody is silent, no lease expires."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker.protocol.codec import encode
from broker.protocol.messages import BeatRequest
from broker.server import dispatch
from broker.server.dispatch import Dispatcher
from broker.server.lanes import ReadingClock
from broker.server.leasing import Leasing
from broker.server.liveness import Liveness
from broker.server.server import Broker
from broker.transport.sockets import Router
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.ring import FIRST, RUN, begin, hello, ring
from tests.waiting import until

TIMEOUT_S = 6.0


class Held:
    """A broker's socket that can be held up, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.gate = FakeClock(), asyncio.Event()
        self.gate.set()
        self.pauses = 0
        self.dispatchers: list[tuple[Dispatcher, Liveness]] = []
        made, receive = Broker._dispatcher, Router.receive

        def dispatcher(broker: Broker, *arguments: Any) -> Dispatcher:
            self.dispatchers.append((found := made(broker, *arguments), broker.parts.peers))
            return found

        async def held(router: Router) -> list[zmq.Frame]:
            frames = await receive(router)
            await self.gate.wait()
            return frames

        def pause(_leasing: Leasing) -> None:
            self.pauses += 1

        monkeypatch.setattr(dispatch, "ReadingClock", lambda _: ReadingClock(self.clock))
        monkeypatch.setattr(Broker, "_dispatcher", dispatcher)
        monkeypatch.setattr(Router, "receive", held)
        monkeypatch.setattr(Leasing, "pause_reaping", pause)

    async def until_idle(self, wanted: bool) -> None:
        """Wait until all that arrived is read, or is not."""
        ((dispatcher, _),) = self.dispatchers
        await until(lambda: dispatcher._router.is_idle == wanted)

    def pass_time(self, seconds: float) -> None:
        """Tick as the broker does."""
        ((dispatcher, _),) = self.dispatchers
        for _ in range(round(10 * seconds)):
            self.clock.now += 0.1
            dispatcher.tick()

    def is_suspect(self, name: str) -> bool:
        ((_, peers),) = self.dispatchers
        (peer,) = peers.named(name)
        return peers.is_suspect(peer)


def test_nobody_is_silent_whose_heartbeat_waits_unread(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        here = Held(monkeypatch)
        async with (
            ring(redis_url, keys, heartbeat_timeout_s=TIMEOUT_S) as served,
            served.raw_socket("a") as socket,
        ):
            await begin(served.store, groups=0)
            await socket.send(encode(hello("a"), run=RUN, incarnation="a", seq=1))
            await asyncio.wait_for(socket.recv(), 5)
            await here.until_idle(True)
            here.pass_time(TIMEOUT_S - 1)
            here.gate.clear()
            await socket.send(encode(BeatRequest((), FIRST), run=RUN, incarnation="a", seq=2))
            await here.until_idle(False)

            here.pass_time(10 * TIMEOUT_S)

            assert not here.is_suspect("a")
            assert here.pauses > 0, "its leases were not renewed for the same reason"
            here.gate.set()
            await asyncio.wait_for(socket.recv(), 5)
            await here.until_idle(True)
            paused = here.pauses
            here.pass_time(TIMEOUT_S - 1)
            assert not here.is_suspect("a")
            here.pass_time(2)
            assert here.is_suspect("a"), "now it has been silent"
            assert here.pauses == paused

    asyncio.run(story())


def test_whoever_is_silent_is_found_though_others_never_let_the_socket_be_empty() -> None:
    """Connections are read in turn: when one has its next turn, a message of another was read."""
    clock = FakeClock()
    reading = ReadingClock(clock)
    peers = Liveness(
        heartbeat_timeout_s=TIMEOUT_S, max_actors=2, max_actors_per_key=2, clock=reading
    )
    silent = peers.admit(hello("silent"), "key", "tag", b"silent")

    for _ in range(2):  # so much to read that the first connection has no second turn
        for number in range(1000):
            clock.now += 0.1
            reading.hear(b"%d" % number)
    assert not peers.is_suspect(silent)
    assert reading.late_s() == pytest.approx(99.9)

    for number in range(130):
        clock.now += 0.1
        reading.hear(b"%d" % (number % 2))
    assert peers.is_suspect(silent)
