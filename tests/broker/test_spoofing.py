"""One place in the broker for each key: lies about names, floods of HELLO, and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.client.client import BrokerClient
from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    LeaseRequest,
    Refusal,
    ReleaseRequest,
    Verdict,
)
from configs.errors import RefusedError
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello, pair_of, ring


async def cut(here: Ring, client: BrokerClient) -> None:
    """The end of an actor's process: the system closes its connection."""
    here.clients.remove(client)
    await client.close()


@pytest.mark.parametrize(
    "spoof",
    [LeaseRequest(1, FIRST), ReleaseRequest(()), Bye()],
    ids=["a lease that overtakes all others", "a farewell", "a bye"],
)
def test_a_message_in_anothers_name_starves_nobody(
    redis_url: str, keys: Path, spoof: object
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=4)
            honest = await here.actor("honest")
            async with here.raw_socket("honest") as liar:  # the same key, the victim's name
                frame = encode(spoof, run=RUN, incarnation="honest", seq=2**63 - 1)
                await liar.send(frame)
                answer = decode(await asyncio.wait_for(liar.recv(), 5), max_bytes=2**20).message
                reply = await honest.lease(LeaseRequest(1, FIRST), deadline_s=1)

            assert isinstance(answer, Refusal)
            assert answer.code == "hello"
            assert reply.status == "OK"

    asyncio.run(story())


def test_a_connection_that_is_cut_leaves_its_incarnation_to_the_next(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=4)
            before = await here.actor("honest")
            (lease,) = (await before.lease(LeaseRequest(1, FIRST))).leases
            await cut(here, before)

            after = await here.actor("honest")
            kept = await after.beat(BeatRequest((Beat(lease.task_id, lease.fence),), FIRST))
            assert kept.verdicts[0].verdict is Verdict.OK

    asyncio.run(story())


def test_one_key_takes_one_place_however_often_it_says_hello(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, max_actors=8) as here:
            await begin(here.store, groups=4)
            codes: list[str] = []
            async with here.raw_socket("greedy") as greedy:
                for number in range(24):
                    name = f"greedy-{number}"
                    await greedy.send(encode(hello(name), run=RUN, incarnation=name, seq=1))
                    while len(codes) - codes.count("probe") <= number:
                        answer = decode(await asyncio.wait_for(greedy.recv(), 5), max_bytes=2**20)
                        codes.append(getattr(answer.message, "code", "welcome"))
                honest = await here.actor("honest")

                assert (await honest.lease(LeaseRequest(1, FIRST))).status == "OK"
            assert codes.count("welcome") == 1
            assert codes.count("full") + codes.count("busy") == 23  # too many, then too often

    asyncio.run(story())


def test_an_actor_that_starts_anew_takes_its_keys_place_and_its_work_is_free_at_once(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            pair = pair_of(keys, "slot-0")
            first = await here.actor("slot-0-a", keys=pair)
            leases = (await first.lease(LeaseRequest(2, FIRST))).leases
            second = here.client("slot-0-b", keys=pair)

            with pytest.raises(RefusedError, match=r"max_actors_per_key = 1.*nyala keys add"):
                await second.hello(hello("slot-0-b"))  # two that live: the one that works goes on
            await cut(here, first)  # as when a process dies: no BYE
            await second.hello(hello("slot-0-b"), deadline_s=5)
            again = (await second.lease(LeaseRequest(2, FIRST), deadline_s=5)).leases
            assert {lease.task_id for lease in again} == {lease.task_id for lease in leases}

    asyncio.run(story())
