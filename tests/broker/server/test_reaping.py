"""Expired leases that a broker reaps, and those that it leaves alone after an outage."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from broker.server.leasing import REAP_BATCH, Leasing
from broker.server.liveness import Liveness
from buffer.operations.operation import Operation, ScriptCall
from configs.errors import StoreError
from configs.settings import BrokerSettings
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.ring import hello


class Store:
    """Keeps how many leases each call may reap; a fake, so that it can be away on request."""

    def __init__(self) -> None:
        self.is_away = False
        self.batches: list[object] = []

    async def run(self, operation: Operation[Any]) -> list[int]:
        if self.is_away:
            raise StoreError("Redis is away")
        call = next(operation.steps())
        assert isinstance(call, ScriptCall)
        self.batches.append(call.arguments[1])
        return []


def test_heartbeats_have_the_time_of_a_lease_after_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        clock = FakeClock()
        monkeypatch.setattr(time, "monotonic", clock)
        peers = Liveness(heartbeat_timeout_s=6, max_actors=9, max_actors_per_key=1, clock=clock)
        store, settings = Store(), BrokerSettings(lease_timeout_s=15)
        leasing = Leasing(store, settings, peers, SimpleNamespace())  # type: ignore[arg-type]

        async def reap_for(seconds: float) -> None:
            for _ in range(int(seconds)):
                clock.now += 1.0
                await leasing.reap()

        await reap_for(15)
        store.is_away = True
        with pytest.raises(StoreError):
            await leasing.reap()
        store.is_away = False
        store.batches.clear()
        await reap_for(15)

        assert store.batches == [0] * 14 + [REAP_BATCH]

    asyncio.run(story())


def test_short_leases_expire_although_the_broker_looks_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        clock = FakeClock()
        monkeypatch.setattr(time, "monotonic", clock)
        peers = Liveness(heartbeat_timeout_s=1, max_actors=9, max_actors_per_key=1, clock=clock)
        store, settings = Store(), BrokerSettings(lease_timeout_s=2)
        leasing = Leasing(store, settings, peers, SimpleNamespace())  # type: ignore[arg-type]

        for _ in range(5):
            clock.now += 1.2 * leasing.reap_every_s + 0.5  # half a second late, each time
            await leasing.reap()

        assert store.batches[-1] == REAP_BATCH

    asyncio.run(story())


def test_a_look_for_expired_leases_counts_work_of_actors_that_were_missed_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        clock = FakeClock()
        monkeypatch.setattr(time, "monotonic", clock)
        peers = Liveness(heartbeat_timeout_s=6, max_actors=9, max_actors_per_key=1, clock=clock)
        a, b = (peers.admit(hello(name), name, name, name.encode()) for name in ("a", "b"))
        leasing = Leasing(Store(), BrokerSettings(), peers, SimpleNamespace())  # type: ignore[arg-type]
        leasing.recoveries.granted(a, [1])
        clock.now += 2
        leasing.recoveries.granted(b, [1])  # shared: the broker does not miss the first yet

        clock.now += 5
        await leasing.reap()

        assert leasing.recoveries.recoveries.total == 2

    asyncio.run(story())
