"""One place in the broker for each key: lies about names, floods of HELLO, and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.client import BrokerClient
from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    LeaseRequest,
    Refusal,
    ReleaseRequest,
    Verdict,
    Verdicts,
    Welcome,
)
from buffer import operations
from configs.errors import RefusedError
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello, pair_of, ring, until_seen


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


def test_a_name_under_another_key_is_another_actor(redis_url: str, keys: Path) -> None:
    """Names of actors are no secret: whoever resumes a task reads them in its chunks."""
    hostile = pair_of(keys, "hostile")

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=4)
            async with here.raw_socket(keys=hostile) as liar:

                async def say(message: object, seq: int) -> object:
                    await liar.send(encode(message, run=RUN, incarnation="honest", seq=seq))
                    return decode(await asyncio.wait_for(liar.recv(), 5), max_bytes=2**20).message

                assert isinstance(await say(hello("honest"), 1), Welcome)
                honest = await here.actor("honest")  # the name was taken before it came
                (lease,) = (await honest.lease(LeaseRequest(1, FIRST))).leases
                rows = ((lease.task_id, lease.fence),)
                verdicts = await say(ReleaseRequest(rows), 2)
                assert isinstance(verdicts, Verdicts)
                assert verdicts.verdicts[0].verdict is Verdict.OUTDATED
                assert isinstance(await say(Bye(), 3), Bye)

            beat = BeatRequest((Beat(lease.task_id, lease.fence),), FIRST)
            assert (await honest.beat(beat, deadline_s=1)).verdicts[0].verdict is Verdict.OK

    asyncio.run(story())


def test_the_end_of_a_false_namesake_ends_no_lease_of_the_true_one(
    redis_url: str, keys: Path
) -> None:
    """At a broker that does not know the actor whose name is used."""
    hostile = pair_of(keys, "hostile")

    async def story() -> None:
        async with ring(redis_url, keys) as here, ring(redis_url, keys) as elsewhere:
            await begin(here.store, groups=4)
            honest = await here.actor("honest")
            (lease,) = (await honest.lease(LeaseRequest(1, FIRST))).leases
            false = await elsewhere.actor("honest", keys=hostile)
            assert (await false.lease(LeaseRequest(1, FIRST))).status == "OK"
            await cut(elsewhere, false)
            await elsewhere.actor("another", keys=hostile)  # takes the place of the one that ended

            beat = BeatRequest((Beat(lease.task_id, lease.fence),), FIRST)
            assert (await honest.beat(beat)).verdicts[0].verdict is Verdict.OK
            held = await here.store.run(operations.inspect())
            assert held.keys() == {lease.task_id}, "its own leases are over"
            assert held[lease.task_id].attempts == 0

    asyncio.run(story())


@pytest.mark.slow
def test_the_figures_of_a_name_are_those_of_its_key(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            await here.actor("honest")
            other = here.client("honest", keys=pair_of(keys, "liar"))
            await other.hello(hello("honest", capacity=7), deadline_s=5)
            seen = await until_seen(here, 2)

            assert [actor.incarnation for actor in seen] == ["honest"] * 2
            capacities = {actor.fields["key"]: actor.fields["capacity"] for actor in seen}
            of_honest = pair_of(keys, "honest").public.decode()[:12]
            assert capacities.pop(of_honest) == "64"
            assert list(capacities.values()) == ["7"]

    asyncio.run(story())
