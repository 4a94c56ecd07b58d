"""One enrolment key and many registered ones: a holder like any other, however many keys it has."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from broker.client import BrokerClient
from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Enrol,
    FailRequest,
    Failure,
    LeaseRequest,
    Refusal,
    SubmitRequest,
    Verdict,
)
from broker.server.flow_control import MAX_REQUESTS_PER_PEER, MOST_FAILURES
from broker.server.service import Service
from broker.transport.allow_list import Role, add, read_allowed, revoke
from broker.transport.enrolled import rotate_client_key
from broker.transport.keys import KeyPair, load_pair, make_keys, new_pair, place_public
from buffer import operations
from configs.errors import RefusedError
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello, ring, until_refused


async def replicas(here: Ring, count: int) -> list[BrokerClient]:
    """Actors that share the secret `fleet`, and have registered a key each."""
    holder = here.client("starting", keys=load_pair(here.keys, "fleet"))
    actors = []
    for n in range(count):
        pair = new_pair()
        await holder.order(Enrol(pair.public.decode()), deadline_s=5)
        actors.append(await here.actor(f"replica-{n}", keys=pair))
    return actors


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Keys of a run with an enrolment key `fleet`."""
    folder = make_keys(tmp_path / "keys")
    add(folder, "fleet", Role.ENROLMENT)
    return folder


async def fail(actor: BrokerClient, count: int) -> int:
    """Fail what the actor gets; returns how much that was."""
    leases = (await actor.lease(LeaseRequest(count, FIRST), deadline_s=5)).leases
    rows = tuple(Failure(lease.task_id, lease.fence, "data", "x") for lease in leases)
    await actor.fail(FailRequest(rows), deadline_s=5)
    return len(rows)


def tag_of(keys: Path, name: str) -> str:
    return load_pair(keys, name).public.decode()[:12]


def test_keys_of_one_enrolment_fail_as_one_and_are_suspended_as_one(
    redis_url: str, fleet: Path
) -> None:
    """None of them has enough failures to be judged alone."""

    async def story() -> None:
        async with ring(redis_url, fleet) as here:
            await begin(here.store, groups=200)
            honest = await here.actor("honest")
            await honest.lease(LeaseRequest(2, FIRST))
            failed = 0
            for evil in await replicas(here, 6):
                failed += await fail(evil, 14)

            assert failed <= 45, (
                f"{failed} failures of one enrolment key, 14 of them of one replica"
            )
            stats = await here.store.run(operations.stats())
            assert (stats.dead, stats.dropped) == (0, {})
            closed = await here.store.run(operations.closed())
            assert list(closed.keys) == [tag_of(fleet, "fleet")]
            assert (await honest.lease(LeaseRequest(2, FIRST))).status == "OK"

    asyncio.run(story())


def test_one_broken_replica_is_suspended_alone(redis_url: str, fleet: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, fleet) as here:
            await begin(here.store, groups=200)
            broken, *healthy = await replicas(here, 3)
            for actor in healthy:
                assert (await actor.lease(LeaseRequest(4, FIRST))).status == "OK"
            for _ in range(4):
                await fail(broken, 15)

            (tag,) = (await here.store.run(operations.closed())).keys
            assert tag.startswith(f"{tag_of(fleet, 'fleet')}~")
            assert (await here.store.run(operations.stats())).dead == 0
            for actor in healthy:
                assert (await actor.lease(LeaseRequest(4, FIRST))).status == "OK"

    asyncio.run(story())


def test_one_broken_replica_is_suspended_alone_beside_another_holder(
    redis_url: str, fleet: Path
) -> None:
    """Its failures are not those of its fleet, even where there is a holder to compare it with."""

    async def story() -> None:
        async with ring(redis_url, fleet) as here:
            await begin(here.store, groups=200)
            honest = await here.actor("honest")
            broken, *healthy = await replicas(here, 3)
            for lease in (await honest.lease(LeaseRequest(MOST_FAILURES, FIRST))).leases:
                await honest.submit(submission(lease))
            await fail(broken, MOST_FAILURES - 1)
            await fail(healthy[0], 1)
            assert not (await here.store.run(operations.closed())).keys, "one is not a fleet"
            await fail(broken, 15)

            (tag,) = (await here.store.run(operations.closed())).keys
            assert tag.startswith(f"{tag_of(fleet, 'fleet')}~")
            for actor in (honest, *healthy):
                assert (await actor.lease(LeaseRequest(4, FIRST))).status == "OK"

    asyncio.run(story())


def test_replicas_that_stand_still_share_their_work_as_one_holder(
    redis_url: str, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.server.leasing.SHARE_STILL_MS", 200)

    async def story() -> None:
        async with ring(redis_url, fleet, long_poll_s=1.0) as here:
            await begin(here.store, groups=20)
            for evil in await replicas(here, 10):
                assert len((await evil.lease(LeaseRequest(4, FIRST))).leases) == 4
            honest = await here.actor("honest")
            began, got = time.monotonic(), 0
            while not got:
                got = len((await honest.lease(LeaseRequest(64, FIRST), deadline_s=5)).leases)
                assert time.monotonic() - began < 10, "no work"

            assert got == 20, "half, not an eleventh"

    asyncio.run(story())


def test_replicas_say_hello_no_more_often_than_their_number_may(
    redis_url: str, fleet: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, fleet, max_actors_per_enrolment=4) as here:
            await begin(here.store, groups=2)
            pairs: list[KeyPair] = []
            holder = here.client("starting", keys=load_pair(fleet, "fleet"))
            for _ in range(4):
                pairs.append(new_pair())
                await holder.order(Enrol(pairs[-1].public.decode()), deadline_s=5)
            welcome = 0
            for n, pair in enumerate(pairs):
                name = f"replica-{n}"
                async with here.raw_socket(keys=pair) as socket:
                    for seq in range(20):
                        await socket.send(encode(hello(name), run=RUN, incarnation=name, seq=seq))
                        reply = decode(await socket.recv(), max_bytes=2**20).message
                        welcome += not isinstance(reply, Refusal)
            assert 28 <= welcome <= 40, f"{welcome} HELLOs of one enrolment key"
            assert (await here.actor("honest")) is not None

    asyncio.run(story())


@pytest.mark.slow
def test_connections_of_one_key_have_together_what_one_may_have(
    redis_url: str, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, held = Service.answer, 0

    async def answer(service: Service, envelope: Any, *sender: Any) -> object | None:
        nonlocal held
        if isinstance(envelope.message, SubmitRequest):
            held += 1
            await asyncio.Event().wait()
        return await honest(service, envelope, *sender)

    async def story() -> None:
        async with ring(redis_url, fleet) as here, AsyncExitStack() as stack:
            await begin(here.store, groups=1)
            for n in range(3):
                raw = await stack.enter_async_context(here.raw_socket("many"))
                for seq in range(70):
                    await raw.send(encode(SubmitRequest(()), run=RUN, incarnation=f"{n}", seq=seq))
            actor = await here.actor("honest")
            assert (await actor.lease(LeaseRequest(1, FIRST), deadline_s=5)).status == "OK"
            assert held == MAX_REQUESTS_PER_PEER

    monkeypatch.setattr(Service, "answer", answer)
    asyncio.run(story())


def test_a_registered_key_whose_enrolment_key_cannot_be_read_is_not_allowed(fleet: Path) -> None:
    """Or nobody would answer for what it does."""
    pair = new_pair()
    place_public(fleet / "allowed" / "actor" / "fleet" / "fleet-1.pub", pair.public)
    member = read_allowed(fleet)[pair.public]
    assert member.tag == f"{tag_of(fleet, 'fleet')}~{pair.public.decode()[:12]}"

    (fleet / "allowed" / "enrolment" / "fleet.pub").write_text("nonsense")

    assert pair.public not in read_allowed(fleet)


def test_an_enrolment_key_under_two_roles_vouches_for_nobody(fleet: Path) -> None:
    pair, enrolment = new_pair(), load_pair(fleet, "fleet").public
    place_public(fleet / "allowed" / "actor" / "fleet" / "fleet-1.pub", pair.public)
    assert pair.public in read_allowed(fleet)

    place_public(fleet / "allowed" / "observer" / "mine.pub", enrolment)

    assert read_allowed(fleet).keys() & {pair.public, enrolment} == set()


def test_what_a_rotated_enrolment_key_registered_stays_with_it(redis_url: str, fleet: Path) -> None:
    """Its tags, and so its leases, last; revoking the old key takes it along."""

    async def story() -> None:
        async with ring(redis_url, fleet) as here:
            await begin(here.store, groups=2)
            (actor,) = await replicas(here, 1)
            (lease,) = (await actor.lease(LeaseRequest(1, FIRST))).leases
            before = {m.tag for m in read_allowed(fleet).values() if m.enrolled_by}

            assert rotate_client_key(fleet, "fleet") == "fleet.previous"
            await asyncio.sleep(0.7)
            (added,) = await replicas(here, 1)

            (verdict,) = (await actor.submit(submission(lease))).verdicts
            assert verdict.verdict is Verdict.OK
            tags = {m.tag for m in read_allowed(fleet).values() if m.enrolled_by}
            assert before < tags
            assert {tag.partition("~")[0] for tag in tags - before} == {tag_of(fleet, "fleet")}
            revoke(fleet, "fleet.previous")
            with pytest.raises(RefusedError, match="taken off the allow-list"):
                await until_refused(actor)
            await added.lease(LeaseRequest(1, FIRST), deadline_s=5)

    asyncio.run(story())
