"""A line that is slow both ways joins or is called slow, and is not taken for a wrong key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from broker.protocol.messages import LeaseRequest, Verdict
from broker.transport.keys import KeyPair
from configs.errors import DeadlineError
from lab.faults.proxy import Proxy
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, Ring, begin, hello, ring

pytestmark = pytest.mark.slow

BETWEEN_CONTINENTS_S = 0.5
SLOWEST_S = 2.0


@contextmanager
def long_lines(here: Ring, *, one_way_s: float, number: int = 1) -> Iterator[list[str]]:
    """So many addresses of the broker, each behind a line of that length."""
    host, port = here.endpoint.removeprefix("tcp://").split(":")
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(host, int(port))) for _ in range(number)]
        for proxy in proxies:
            proxy.lag(one_way_s)
        yield [f"tcp://127.0.0.1:{proxy.port}" for proxy in proxies]


async def joins_and_works(here: Ring) -> None:
    """Two seconds away."""
    with long_lines(here, one_way_s=SLOWEST_S) as (endpoint,):
        far = here.client("far", endpoint=endpoint)
        await far.hello(hello("far"))
        (lease,) = (await far.lease(LeaseRequest(1, FIRST))).leases
        (line,) = (await far.submit(submission(lease))).verdicts

    assert line.verdict in {Verdict.OK, Verdict.DUP}


async def joins_one_of_several(here: Ring) -> None:
    """Which are far away, and each of which it gives more time than the one before."""
    with long_lines(here, one_way_s=BETWEEN_CONTINENTS_S, number=2) as (first, second):
        far = here.client("between", endpoint=first, other_endpoints=[second])
        await far.hello(hello("between"), deadline_s=40)


def test_actors_far_from_one_broker_and_from_several_join(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            async with asyncio.TaskGroup() as both:  # they only wait
                both.create_task(joins_and_works(here))
                both.create_task(joins_one_of_several(here))

    asyncio.run(story())


def test_a_line_that_is_too_slow_is_called_slow(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.transport.sockets.HANDSHAKE_MS", 1_000)
    monkeypatch.setattr("broker.connection.SLOW_S", 0.9)

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            with long_lines(here, one_way_s=BETWEEN_CONTINENTS_S) as (endpoint,):
                far = here.client("far", endpoint=endpoint)
                with pytest.raises(DeadlineError, match="the line to the broker is slow") as caught:
                    await far.hello(hello("far"), deadline_s=4)
        assert "broker.pub may not" not in str(caught.value)

    asyncio.run(story())


def test_a_wrong_key_is_called_one(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            lost = here.client("lost", server_key=KeyPair(*zmq.curve_keypair()).public)
            with pytest.raises(DeadlineError, match=r"broker\.pub may not be its key"):
                await lost.hello(hello("lost"), deadline_s=3)

    asyncio.run(story())
