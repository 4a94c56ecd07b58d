"""When a broker lets the store share leases: it looks at all of them each time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from broker.protocol.messages import LeaseReply, LeaseRequest
from broker.server.leasing import SHARE_EVERY_S, SHARE_PAUSES, Leasing
from broker.server.liveness import Liveness, PeerSession
from buffer.operations.operation import Operation
from buffer.operations.values import LeaseAnswer
from configs.settings import BrokerSettings
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.ring import FIRST, hello
from tests.waiting import until

TAKES_S = 0.002


class Store:
    """Answers with so many tasks each time; a fake, as only its time counts."""

    def __init__(self, clock: FakeClock, *shared: int) -> None:
        self._clock, self._shared = clock, list(shared)

    async def run(self, operation: Operation[Any]) -> list[int]:
        assert operation.name == "share"
        self._clock.now += TAKES_S
        return list(range(self._shared.pop(0)))

    @property
    def num_asked(self) -> int:
        return -len(self._shared)


@pytest.mark.parametrize(("shared", "pause_s"), [(4, SHARE_PAUSES * TAKES_S), (0, SHARE_EVERY_S)])
def test_whoever_waits_next_is_served_soon_unless_there_is_nothing_to_share(
    monkeypatch: pytest.MonkeyPatch, shared: int, pause_s: float
) -> None:
    async def story() -> None:
        clock = FakeClock()
        monkeypatch.setattr(time, "monotonic", clock)
        peers = Liveness(heartbeat_timeout_s=6, max_actors=9, max_actors_per_key=1, clock=clock)
        store = Store(clock, *([shared] * 9))
        cache = SimpleNamespace(is_full=False, closed=SimpleNamespace(has=lambda _tag: False))
        leasing = Leasing(store, BrokerSettings(), peers, cache)  # type: ignore[arg-type]
        waiting = [peers.admit(hello(name), name, name, name.encode()) for name in ("a", "b")]

        async def share() -> int:
            """Let each try; return how often the store was asked."""
            before = store.num_asked
            for peer in waiting:
                await leasing._share(peer, peer.lease_seq, LeaseRequest(4, FIRST))
            return store.num_asked - before

        assert await share() == 1
        clock.now += pause_s - 2 * TAKES_S
        assert await share() == 0
        clock.now += 2 * TAKES_S
        assert await share() == 1

    asyncio.run(story())


class Empty:
    """Has no work for anybody; a fake, so that nothing else ends the wait."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def run(self, operation: Operation[Any]) -> Any:
        self.asked.append(operation.name)
        return [] if operation.name == "share" else LeaseAnswer("EMPTY", [])


def _of_empty() -> tuple[Leasing, Empty, PeerSession]:
    peers = Liveness(
        heartbeat_timeout_s=60, max_actors=9, max_actors_per_key=1, clock=time.monotonic
    )
    cache = SimpleNamespace(
        is_full=False, publication=None, closed=SimpleNamespace(has=lambda _tag: False)
    )
    store, settings = Empty(), BrokerSettings(long_poll_s=60)
    leasing = Leasing(store, settings, peers, cache)  # type: ignore[arg-type]
    return leasing, store, peers.admit(hello("a"), "a", "a", b"a")


def test_who_waits_for_work_is_answered_when_the_broker_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "broker.server.leasing.time", SimpleNamespace(monotonic=lambda: 1000.0, time_ns=lambda: 0)
    )

    async def story() -> None:
        leasing, store, peer = _of_empty()
        waiting = asyncio.create_task(leasing.wait(peer, peer.lease_seq, LeaseRequest(4, FIRST)))
        await until(lambda: len(leasing.queue) == 1)

        leasing.close()

        async with asyncio.timeout(10):
            reply = await waiting
        assert reply is not None
        assert reply.leases == ()
        assert store.asked == ["lease"], "too short a wait for others to share their work"

    asyncio.run(story())


def test_a_grant_that_cannot_be_sent_goes_back() -> None:
    async def story() -> None:
        leasing, store, peer = _of_empty()
        reply = LeaseReply("OK", (), None)
        peer.granted = (1, reply)

        await leasing.release_unsent(peer, reply)

        assert (store.asked, peer.granted) == (["release"], None)

    asyncio.run(story())
