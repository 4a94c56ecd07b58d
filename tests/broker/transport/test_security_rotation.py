"""Keys are exchanged while actors work, and no process has to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq

from broker.protocol.messages import BeatRequest, LeaseRequest, Verdict
from broker.transport.allow_list import Role, read_allowed, revoke
from broker.transport.enrolled import (
    announce_broker_key,
    broker_public_keys,
    rotate_broker_key,
    rotate_client_key,
)
from broker.transport.keys import load_pair, load_public, make_keys
from configs.errors import DeadlineError, RefusedError, SettingsError
from tests.broker.support.keys import keys_with_actor
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, Ring, begin, hello, pair_of, ring, until_refused


async def let_in_only_with(here: Ring, server_key: bytes, outdated: bytes) -> None:
    """Wait until the broker takes new connections under another key."""
    async with asyncio.timeout(10):
        while True:
            client = here.client("probe", server_key=server_key)
            try:
                await client.hello(hello("probe"), deadline_s=0.5)
                break
            except DeadlineError:
                continue
    with pytest.raises(DeadlineError, match=r"broker\.pub"):
        await here.client("late", server_key=outdated).hello(hello("late"), deadline_s=1.0)


@pytest.mark.slow
def test_the_brokers_key_is_exchanged_while_actors_work(redis_url: str, tmp_path: Path) -> None:
    async def story() -> None:
        folder = make_keys(tmp_path / "keys")
        elsewhere = tmp_path / "actor"  # what an actor's machine has
        elsewhere.mkdir()
        (elsewhere / "broker.pub").write_bytes((folder / "broker.pub").read_bytes())
        old = load_public(folder, "broker")
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            actor = here.client(
                "actor-1", server_key=old, read_server_keys=lambda: broker_public_keys(elsewhere)
            )
            await actor.hello(hello("actor-1"), deadline_s=10)
            lease, _ = (await actor.lease(LeaseRequest(2, FIRST))).leases

            next_key = announce_broker_key(folder)
            (elsewhere / next_key.name).write_bytes(next_key.read_bytes())
            rotate_broker_key(folder)
            await let_in_only_with(here, load_public(folder, "broker"), old)

            (line,) = (await actor.submit(submission(lease), deadline_s=10)).verdicts
            assert line.verdict is Verdict.OK  # under the lease it had before
            assert load_public(folder, "broker") != old

    asyncio.run(story())


@pytest.mark.slow
def test_a_key_that_cannot_be_used_leaves_the_broker_as_it_is(
    redis_url: str, tmp_path: Path
) -> None:
    async def story() -> None:
        folder = make_keys(tmp_path / "keys")
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            (folder / "broker.key").write_text("half a key")
            await asyncio.sleep(1.2)

            await here.actor("actor-1")

    asyncio.run(story())


@pytest.mark.slow
def test_an_actors_old_key_works_until_it_is_revoked(redis_url: str, tmp_path: Path) -> None:
    async def story() -> None:
        folder = make_keys(tmp_path / "keys")
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            old = await here.actor("old", keys=pair_of(folder, "actor"))

            assert rotate_client_key(folder, "actor") == "actor.previous"
            new = here.client("new", keys=pair_of(folder, "actor"))
            await new.hello(hello("new"), deadline_s=5)
            await asyncio.sleep(0.7)
            await old.beat(BeatRequest((), FIRST), deadline_s=2)
            revoke(folder, "actor.previous")

            with pytest.raises(RefusedError, match="taken off the allow-list"):
                await until_refused(old)
            await new.beat(BeatRequest((), FIRST), deadline_s=2)

    asyncio.run(story())


def test_rotation_keeps_the_role_and_comes_in_order(tmp_path: Path) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    with pytest.raises(SettingsError, match="must be announced before it is used"):
        rotate_broker_key(folder)
    with pytest.raises(SettingsError, match="got 0 of nobody"):
        rotate_client_key(folder, "nobody")

    previous = rotate_client_key(folder, "actor")
    assert {member.name: member.role for member in read_allowed(folder).values()} == {
        "actor": Role.ACTOR,
        "actor.previous": Role.ACTOR,
        "enrolment": Role.ENROLMENT,
    }
    assert load_pair(folder, "actor").public in read_allowed(folder)
    with pytest.raises(SettingsError, match=r"run `nyala keys revoke actor\.previous"):
        rotate_client_key(folder, "actor")
    revoke(folder, previous)
    rotate_client_key(folder, "actor")


def test_a_public_key_belongs_to_its_secret_after_an_exchange(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    announce_broker_key(folder)
    assert len(broker_public_keys(folder)) == 2
    rotate_broker_key(folder)

    secret = (folder / "broker.key").read_bytes().strip()
    assert broker_public_keys(folder) == [zmq.curve_public(secret)]
