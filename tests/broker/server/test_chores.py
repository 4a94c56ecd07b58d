"""Periodic chores of a broker: none of them ends it."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from broker.protocol.messages import BeatRequest, LeaseRequest
from broker.transport.allow_list import AllowList
from tests.broker.support.ring import FIRST, begin, ring
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
