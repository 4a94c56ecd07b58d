"""Periodic chores of a broker: none of them ends it, unless its Redis can hold no run."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from broker.protocol.messages import BeatRequest, LeaseRequest
from broker.server.server import Broker
from broker.transport.allow_list import AllowList
from buffer.store import AsyncStore
from configs.errors import StoreUnfit
from tests.broker.support.ring import FIRST, RUN, begin, ring, settings_with
from tests.buffer.support.servers import server_in_cluster_mode
from tests.waiting import until


def test_a_broker_without_open_files_left_serves_whom_it_knows(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections have taken them all, so that no folder can be read."""

    looks: list[AllowList] = []

    def refresh(allowed: AllowList) -> None:
        looks.append(allowed)
        raise OSError(errno.EMFILE, "Too many open files")

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            with monkeypatch.context() as patch:
                patch.setattr(AllowList, "refresh", refresh)
                await until(lambda: len(looks) >= 2)

                await actor.beat(BeatRequest((), FIRST), deadline_s=5)

            assert (await actor.lease(LeaseRequest(1, FIRST), deadline_s=5)).status == "OK"

    asyncio.run(story())


def test_a_redis_in_cluster_mode_ends_it(keys: Path, tmp_path: Path) -> None:
    async def story(url: str) -> None:
        store = AsyncStore(url, RUN)
        try:
            broker = Broker(settings_with(), store, keys=keys)
            await asyncio.wait_for(broker.serve(asyncio.Event()), 20)
        finally:
            await store.close()

    with (
        server_in_cluster_mode(tmp_path / "node") as url,
        pytest.raises(StoreUnfit, match="got a server in cluster mode"),
    ):
        asyncio.run(story(url))
