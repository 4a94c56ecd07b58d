"""Roles, revocation while a run goes on, and the audit of both."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from broker.client import BrokerClient
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    DrainRequest,
    FailRequest,
    LeaseRequest,
    ReleaseRequest,
    RevokeRequest,
    SubmitRequest,
    Verdict,
)
from broker.server import audit
from broker.server.audit import Audit
from broker.transport.allow_list import AllowList, Role, add, read_allowed, revoke
from broker.transport.keys import load_pair
from buffer import operations
from buffer.operations.run import brokers
from configs.errors import RefusedError, SettingsError
from configs.settings import RunSettings, Settings
from configs.weight_path import is_loopback
from tests.broker.support.fake_clock import FakeClock
from tests.broker.support.keys import keys_with_actor
from tests.broker.support.ring import (
    FIRST,
    Ring,
    begin,
    fingerprint,
    hello,
    pair_of,
    ring,
    until_refused,
)
from tests.waiting import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a run with an actor, an observer and an operator."""
    folder = keys_with_actor(tmp_path / "keys")
    add(folder, "watcher", Role.OBSERVER)
    add(folder, "boss", Role.OPERATOR)
    return folder


def peer(here: Ring, name: str) -> BrokerClient:
    return here.client(name, keys=load_pair(here.keys, name))


def test_an_observer_sees_the_run_and_can_change_nothing(redis_url: str, folder: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            await here.actor("actor-1")
            before = fingerprint(redis_url)
            watcher = peer(here, "watcher")

            seen = await watcher.status()
            assert (seen.tasks["ready"], seen.actors) == (2, ("actor-1",))
            for forbidden in (
                watcher.hello(hello("watcher")),
                watcher.lease(LeaseRequest(1, FIRST)),
                watcher.beat(BeatRequest((Beat(0, 1),), FIRST)),
                watcher.submit(SubmitRequest(())),
                watcher.release(ReleaseRequest(((0, 1),))),
                watcher.fail(FailRequest(())),
                watcher.order(RevokeRequest("actor")),
                watcher.order(DrainRequest("actor-1")),
            ):
                with pytest.raises(RefusedError, match=r"got the observer watcher.*as role"):
                    await forbidden
            assert fingerprint(redis_url) == before
            assert Role.ACTOR in {member.role for member in read_allowed(folder).values()}

    asyncio.run(story())


def test_an_actor_can_neither_look_nor_revoke_nor_drain(redis_url: str, folder: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()

            for forbidden in (
                actor.status(),
                actor.order(RevokeRequest("boss")),
                actor.order(DrainRequest("actor-1")),
            ):
                with pytest.raises(RefusedError, match="got the actor actor-1"):
                    await forbidden
            assert "boss" in {member.name for member in read_allowed(folder).values()}
            assert (await actor.lease(LeaseRequest(1, FIRST))).status == "OK"

    asyncio.run(story())


def test_an_operator_makes_no_episodes(redis_url: str, folder: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            boss = peer(here, "boss")

            with pytest.raises(RefusedError, match="Hello must come from actor, got the operator"):
                await boss.hello(hello("boss"))
            assert (await boss.status()).actors == ()

    asyncio.run(story())


def test_an_operator_drains_an_actor(redis_url: str, folder: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=2)
            leaving, staying = await here.actor("leaving"), await here.actor("staying")
            lease, _ = (await leaving.lease(LeaseRequest(2, FIRST))).leases

            receipt = await peer(here, "boss").order(DrainRequest("leaving"))
            assert "leaving gets no more work" in receipt.text
            assert (await leaving.lease(LeaseRequest(1, FIRST))).status == "DONE"
            kept = await leaving.beat(BeatRequest((Beat(lease.task_id, lease.fence),), FIRST))
            assert kept.verdicts[0].verdict is Verdict.OK
            assert (await staying.lease(LeaseRequest(1, FIRST))).status == "OK"
            with pytest.raises(RefusedError, match="must be one that this broker serves"):
                await peer(here, "boss").order(DrainRequest("nobody"))

    asyncio.run(story())


@pytest.mark.slow
def test_a_revoked_actor_is_refused_at_once_and_its_work_goes_to_others(
    redis_url: str, folder: Path
) -> None:
    async def story() -> None:
        add(folder, "spot", Role.ACTOR)
        stolen = load_pair(folder, "spot")
        async with ring(redis_url, folder, lease_timeout_s=1.5, reap_every_s=0.2) as here:
            await begin(here.store, groups=1)
            spot, other = peer(here, "spot"), await here.actor("other")
            await spot.hello(hello("spot"))
            leases = (await spot.lease(LeaseRequest(2, FIRST))).leases
            beats = BeatRequest(tuple(Beat(e.task_id, e.fence) for e in leases), FIRST)
            parked = asyncio.create_task(spot.lease(LeaseRequest(2, FIRST), deadline_s=5))

            await peer(here, "boss").order(RevokeRequest("spot"))
            with pytest.raises(RefusedError, match="taken off the allow-list"):
                await spot.beat(beats)
            again = (await other.lease(LeaseRequest(2, FIRST), deadline_s=10)).leases
            while not again:
                again = (await other.lease(LeaseRequest(2, FIRST), deadline_s=10)).leases

            assert {e.task_id for e in again} <= {e.task_id for e in leases}
            with pytest.raises(RefusedError):
                await parked
            with pytest.raises(RefusedError, match="refused this key"):
                await here.client("new life", keys=stolen).hello(hello("new life"))

    asyncio.run(story())


def test_a_file_that_is_removed_by_hand_revokes_within_a_second(
    redis_url: str, folder: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            actor = await here.actor()
            (folder / "allowed" / "actor" / "actor-1.pub").unlink()
            with pytest.raises(RefusedError, match="taken off the allow-list"):
                await until_refused(actor, timeout_s=1.5)

    asyncio.run(story())


def test_a_key_has_its_role_from_the_folder_it_lies_in(tmp_path: Path) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    allowed = folder / "allowed"
    key = load_pair(folder, "actor").public
    roles = AllowList(folder)

    def role_in(place: Path) -> Role | None:
        for path in allowed.rglob("actor.pub"):
            path.unlink()
        place.mkdir(exist_ok=True)
        (place / "actor.pub").write_bytes(key)
        roles.refresh()
        return roles.role(key)

    assert role_in(allowed) is Role.ACTOR
    assert role_in(allowed / "actor") is Role.ACTOR
    assert role_in(allowed / "observer") is Role.OBSERVER
    assert role_in(allowed / "operator") is Role.OPERATOR
    assert role_in(allowed / "admin") is None  # no such role
    assert role_in(folder) is None


def test_a_key_under_two_roles_has_none(tmp_path: Path) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    key = load_pair(folder, "actor").public
    (folder / "allowed" / "operator").mkdir()
    (folder / "allowed" / "operator" / "mine.pub").write_bytes(key)

    assert key not in read_allowed(folder)
    (folder / "allowed" / "actor" / "actor.pub").unlink()
    assert read_allowed(folder)[key].role is Role.OPERATOR


def test_a_revoked_key_does_not_come_back_by_itself(tmp_path: Path) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    old = load_pair(folder, "actor").public
    assert revoke(folder, "actor") == [Role.ACTOR]

    keys_with_actor(folder)  # as when the run is taken up again

    assert old not in read_allowed(folder)
    shutil.rmtree(folder / "allowed")
    keys_with_actor(folder)
    assert read_allowed(folder) == {}


def test_names_of_keys_cannot_leave_their_folder(tmp_path: Path) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    for name in ("../actor", "a/b", ".hidden", "", "x" * 65):
        with pytest.raises(SettingsError, match="name of a key must be at most 64 letters"):
            add(folder, name, Role.ACTOR)
        with pytest.raises(SettingsError, match="name of a key must be at most 64 letters"):
            revoke(folder, name)
    with pytest.raises(SettingsError, match="must not be a server's, got broker"):
        add(folder, "broker", Role.ACTOR)
    with pytest.raises(SettingsError, match="must be free, got actor"):
        add(folder, "actor", Role.OBSERVER)
    with pytest.raises(
        SettingsError, match="got nobody; choose one of the names there: actor, enrol"
    ):
        revoke(folder, "nobody")


def events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_joins_refusals_and_revocations_are_written_down(
    redis_url: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "logs" / "audit.jsonl"
    pair_of(folder, "actor-1")

    async def story() -> None:
        async with ring(redis_url, folder, audit_file=file) as here:
            await begin(here.store, groups=1)
            await here.actor("actor-1")
            with pytest.raises(RefusedError):
                await peer(here, "watcher").lease(LeaseRequest(1, FIRST))
            await peer(here, "boss").order(RevokeRequest("watcher"))
            await here.clients[0].bye()
            refusals = (await peer(here, "boss").status()).refusals
            assert refusals == {"role": 1}

    asyncio.run(story())
    lines = events(file)
    assert [(e["event"], e.get("actor") or e.get("peer") or e.get("key")) for e in lines] == [
        ("actor joined", "actor-1"),
        ("refused", "watcher"),
        ("revocation asked for", "watcher"),
        ("revoked", "watcher"),
        ("actor left", "actor-1"),
    ]
    assert lines[2]["by"] == "boss"
    assert lines[1]["code"] == "role"


def test_a_flood_of_refusals_is_counted_and_written_once(tmp_path: Path) -> None:
    clock = FakeClock()
    book = Audit(tmp_path / "audit.jsonl", clock=clock)
    for _ in range(1000):
        book.record_refusal("role", "watcher", "no")
    book.record_refusal("role", "other", "no")
    book.record_refusal("store", "watcher")  # belongs to every restart
    assert len(events(tmp_path / "audit.jsonl")) == 2

    clock.now += audit.QUIET_S
    book.flush()
    assert events(tmp_path / "audit.jsonl")[2]["more"] == 999
    assert book.refusals == {"role": 1001, "store": 1}


def test_the_audit_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_FILE_BYTES", 2000)
    clock = FakeClock()
    book = Audit(tmp_path / "audit.jsonl", clock=clock)
    for number in range(3 * audit.MAX_BURSTS):  # a peer for each, as from a forged address
        book.record_refusal("unknown key", f"10.0.{number // 256}.{number % 256}")
    for number in range(2 * audit.MAX_EVENTS):
        book.record("actor joined", actor=f"actor-{number}")

    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 2000
    assert len(book._bursts) <= audit.MAX_BURSTS


def test_an_audit_file_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    book = Audit(tmp_path / "logs" / "audit.jsonl")

    book.record_refusal("role", "watcher", "no")
    book.record("actor joined", actor="a")

    assert book.refusals == {"role": 1}


@pytest.mark.slow
def test_refusals_are_shown_with_the_brokers_figures(redis_url: str, folder: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, folder) as here:
            await begin(here.store, groups=1)
            await here.actor()
            with pytest.raises(RefusedError):
                await peer(here, "watcher").lease(LeaseRequest(1, FIRST))

            async def counted() -> dict[str, float] | None:
                figures = (await here.store.run(brokers())).get(here.endpoint, {})
                return figures if figures.get("refused_role") == 1 else None

            figures = await until(counted)
            assert figures["actors"] == 1
            assert len(await here.store.run(operations.actors())) == 1

    asyncio.run(story())


def test_everything_listens_on_loopback_by_default() -> None:
    settings = Settings(run=RunSettings(model="init"))

    assert is_loopback(settings.broker.endpoint)
    assert is_loopback(settings.learner.publisher_endpoint)
    assert settings.broker.other_endpoints == ()


def test_every_promise_of_the_documentation_names_tests_that_exist() -> None:
    root = Path(__file__).parents[2]
    promises = (root / "docs" / "security.md").read_text().partition("## Promises")[2]
    named = set(re.findall(r"`(test_\w+)`", promises))
    written = set()
    for file in (root / "tests").rglob("test_*.py"):
        written |= set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))

    assert len(named) > 20
    assert named <= written, named - written
