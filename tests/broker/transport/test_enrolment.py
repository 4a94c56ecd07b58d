"""Enrolment: replicas that share one secret, each under a key of its own."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from pathlib import Path

import pytest

from broker.protocol.messages import DrainRequest, Enrol, LeaseRequest, RevokeRequest
from broker.server import admin
from broker.transport import enrolled
from broker.transport.allow_list import AllowList, Role, add, enrolled_folder, read_allowed
from broker.transport.enrolled import EnrolledKeys
from broker.transport.keys import KeyPair, load_pair, make_keys, new_pair
from configs.errors import DeadlineError, RefusedError, SettingsError
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.ring import FIRST, Ring, begin, hello, pair_of, ring


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


async def enrol(
    here: Ring, *, pair: KeyPair | None = None, key: str = "enrolment", deadline_s: float = 5
) -> KeyPair:
    """What an actor does at its start."""
    pair = pair or new_pair()
    holder = here.client("starting", keys=load_pair(here.keys, key))
    await holder.order(Enrol(pair.public.decode()), deadline_s=deadline_s)
    return pair


def names(folder: Path) -> set[str]:
    return {m.name for m in read_allowed(folder).values() if m.enrolled_by is not None}


def table(folder: Path, *, max_keys: int = 2) -> tuple[EnrolledKeys, FakeClock]:
    clock = FakeClock()
    return EnrolledKeys(
        folder, AllowList(folder), max_keys=max_keys, clock=clock, steady=clock
    ), clock


def age(folder: Path, name: str, seen_at: float) -> None:
    os.utime(enrolled_folder(folder, "enrolment") / f"{name}.pub", (seen_at, seen_at))


def test_replicas_that_share_a_secret_get_a_key_each(redis_url: str, folder: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=4)
            pairs = [await enrol(here) for _ in range(4)]
            assert len(names(folder)) == len({pair.public for pair in pairs}) == 4

            actors = [await here.actor(f"a{n}", keys=pair) for n, pair in enumerate(pairs)]
            for actor in actors:
                assert (await actor.lease(LeaseRequest(1, FIRST))).status == "OK"
            with pytest.raises(RefusedError, match="max_actors_per_key = 1"):
                await here.actor("a0", keys=pairs[1])

    asyncio.run(story())


def test_an_enrolment_key_registers_keys_and_can_do_nothing_else(
    redis_url: str, folder: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            holder = here.client("holder", keys=load_pair(folder, "enrolment"))
            for forbidden in (
                holder.hello(hello("holder")),
                holder.lease(LeaseRequest(1, FIRST)),
                holder.status(),
                holder.order(RevokeRequest("enrolment")),
                holder.order(DrainRequest("holder")),
            ):
                with pytest.raises(RefusedError, match=r"got the enrolment enrolment.*as role"):
                    await forbidden
            actor = await here.actor()
            with pytest.raises(RefusedError, match="Enrol must come from enrolment"):
                await actor.order(Enrol(new_pair().public.decode()))

    asyncio.run(story())


def test_revoking_an_enrolment_key_revokes_what_it_registered(redis_url: str, folder: Path) -> None:
    async def story() -> None:
        add(folder, "other", Role.ENROLMENT)
        add(folder, "boss", Role.OPERATOR)
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=4)
            alone, child, safe = (
                await enrol(here),
                await enrol(here),
                await enrol(here, key="other"),
            )
            actors = [
                await here.actor(f"a{n}", keys=pair) for n, pair in enumerate((alone, child, safe))
            ]
            boss = here.client("boss", keys=load_pair(folder, "boss"))

            await boss.order(RevokeRequest(read_allowed(folder)[alone.public].name))
            with pytest.raises(RefusedError, match="taken off the allow-list"):
                await actors[0].lease(LeaseRequest(1, FIRST))
            assert (await actors[1].lease(LeaseRequest(1, FIRST))).status == "OK"

            await boss.order(RevokeRequest("enrolment"))
            with pytest.raises(RefusedError, match="taken off the allow-list"):
                await actors[1].lease(LeaseRequest(1, FIRST))
            assert (await actors[2].lease(LeaseRequest(1, FIRST))).status == "OK"
            with pytest.raises((RefusedError, SettingsError)):
                await enrol(here, pair=child)

    asyncio.run(story())


def test_a_file_taken_away_by_hand_revokes_what_its_key_registered(folder: Path) -> None:
    keys, _ = table(folder)
    pair = new_pair()
    keys.register(pair.public, "enrolment")
    assert pair.public in read_allowed(folder)

    (folder / "allowed" / "enrolment" / "enrolment.pub").unlink()

    assert pair.public not in read_allowed(folder)
    (folder / "enrolment.key").unlink()
    add(folder, "enrolment", Role.ENROLMENT)  # another key of that name
    assert pair.public not in read_allowed(folder)


def test_a_flood_of_enrolments_is_bounded_in_rate_and_number(
    redis_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "BURST", 4)
    monkeypatch.setattr(admin, "PER_S", 0.001)

    async def story() -> None:
        add(folder, "other", Role.ENROLMENT)
        async with ring(redis_url, folder, max_actors_per_enrolment=3) as here:
            await begin(here.store, groups=1)
            for _ in range(3):
                await enrol(here)
            with pytest.raises(RefusedError, match="max_actors_per_enrolment = 3, got one more"):
                await enrol(here)
            with pytest.raises(DeadlineError):  # its rate, too, is used up: `busy`
                await enrol(here, deadline_s=0.5)
            await enrol(here, key="other")
            assert len(names(folder)) == 4

    asyncio.run(story())


def test_a_key_of_somebody_else_cannot_be_registered(folder: Path) -> None:
    """Under two roles it would have none: an operator could be shut out."""
    keys, _ = table(folder)
    add(folder, "boss", Role.OPERATOR)
    add(folder, "other", Role.ENROLMENT)
    for name in ("boss", "enrolment"):
        with pytest.raises(SettingsError, match="must be new"):
            keys.register(load_pair(folder, name).public, "enrolment")
    mine = new_pair().public
    assert keys.register(mine, "other") == keys.register(mine, "other")
    with pytest.raises(SettingsError, match="must be new"):
        keys.register(mine, "enrolment")
    for odd in (b"../../operator/boss", b"0" * 39 + b"~", b""):
        with pytest.raises(SettingsError, match="must be z85 of 40"):
            keys.register(odd, "enrolment")
    assert len(read_allowed(folder)) == 4


def test_a_silent_key_makes_room_and_an_unused_one_is_removed(folder: Path) -> None:
    keys, clock = table(folder)
    first, second = (keys.register(new_pair().public, "enrolment") for _ in range(2))
    assert first is not None
    assert second is not None
    age(folder, first, clock.now)
    age(folder, second, clock.now)
    assert keys.register(new_pair().public, "enrolment") is None

    clock.now += enrolled.SILENT_S
    age(folder, second, clock.now)
    third = keys.register(new_pair().public, "enrolment")
    assert names(folder) == {second, third}

    clock.now += enrolled.UNUSED_S + 1
    assert third is not None
    age(folder, third, clock.now)
    assert keys.forget_unused() == [second]
    assert names(folder) == {third}


def test_a_key_whose_file_cannot_be_looked_at_is_not_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share that does not answer for long says nothing about the actor."""
    keys, clock = table(folder)
    name = keys.register(new_pair().public, "enrolment")
    monkeypatch.setattr(enrolled, "last_seen", lambda _path: None)

    for _ in range(4):
        assert keys.forget_unused() == []
        clock.now += enrolled.UNUSED_S / 2

    assert names(folder) == {name}


def test_a_jump_of_the_time_of_day_removes_no_key_and_makes_no_room(folder: Path) -> None:
    """A broker that starts after the jump must hear of the actors before it can judge them."""
    keys, clock = table(folder)
    pairs = [new_pair() for _ in range(2)]
    registered = {keys.register(pair.public, "enrolment") for pair in pairs}
    assert keys.forget_unused() == []
    for jump_s in (3600.0, -3600.0):
        begun = EnrolledKeys(
            folder,
            AllowList(folder),
            max_keys=2,
            clock=lambda: time.time() + jump_s,  # noqa: B023 - called at once
            steady=clock,
        )
        for one in (keys, begun):
            assert one.forget_unused() == []
            assert one.register(new_pair().public, "enrolment") is None
    assert names(folder) == registered


def test_a_key_in_use_is_not_removed(folder: Path) -> None:
    keys, clock = table(folder)
    pair = new_pair()
    name = keys.register(pair.public, "enrolment")
    assert name is not None
    for _ in range(3):
        clock.now += enrolled.UNUSED_S
        keys.mark_seen([pair.public.decode(), "k" * 40])
        assert keys.forget_unused() == []
    assert names(folder) == {name}


def test_a_registered_key_is_a_closed_file_and_heard_of_without_a_change_of_the_list(
    folder: Path,
) -> None:
    keys, clock = table(folder)
    allowed = AllowList(folder)
    pair = new_pair()
    name = keys.register(pair.public, "enrolment")
    allowed.refresh()
    members = allowed.members()
    assert members[pair.public].name == name

    clock.now += enrolled.TOUCH_S + 1
    keys.mark_seen([pair.public.decode()])
    allowed.refresh()

    assert allowed.members() is members
    assert stat.S_IMODE(enrolled_folder(folder, "enrolment").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    keys, _ = table(folder)
    (folder / "allowed" / "actor").write_text("a file where the folder should be")

    with pytest.raises(SettingsError, match=r"allowed/actor/enrolment, .* must be a folder"):
        keys.register(new_pair().public, "enrolment")


def test_a_key_made_by_hand_needs_no_enrolment(redis_url: str, folder: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            actor = await here.actor("a", keys=pair_of(folder, "spot-7"))
            assert (await actor.lease(LeaseRequest(1, FIRST))).status == "OK"
            assert names(folder) == set()

    asyncio.run(story())
