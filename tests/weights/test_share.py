"""Actors that pull from each other, as processes: real ports, real CURVE, real deaths."""

import asyncio
import mmap
import os
import signal
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio

from actors.weights import share
from actors.weights.held import HeldWeights
from actors.weights.links import ActorIdentity, WeightLink
from actors.weights.share import REFRESH_S, WeightShare
from actors.weights.sources import PeerSource
from broker.protocol.weight_messages import (
    CHUNK_BYTES,
    Join,
    Neighbours,
    PeerEndpoint,
    Pull,
    SlicePending,
    VersionGone,
    VersionReplaced,
    WeightChunk,
)
from broker.transport.allow_list import Role, add, revoke
from broker.transport.keys import load_pair
from broker.transport.zap import ZapAuthenticator
from buffer.record.episode import PolicyVersion
from configs.errors import SettingsError
from learner.weights.sites import FAN_OUT
from tests.broker.support.keys import keys_with_actor
from tests.learner.support.listening import listening
from tests.waiting import until
from tests.weights.support.plane import MAX_PUBLISH_S, Plane
from tests.weights.support.scripted_publisher import manifest

pytestmark = pytest.mark.slow

BALLAST = 3_000_000  # 12 MB: three slices


@pytest.fixture
def plane(tmp_path):
    plane = Plane(tmp_path, ballast=BALLAST, broadcast=False)
    try:
        plane.publish()
        yield plane
    finally:
        plane.close()


def join(plane, count: int, **odd):
    """Let actors that share come one after the other, so that their places are known."""
    for place in range(count):
        actor = plane.actor(f"peer-{place}", shares=True, **odd.get(f"peer_{place}", {}))
        actor.wait("synced", timeout_s=60.0)
    return plane.actors[-count:]


def held_by_all(plane, actors):
    manifest = plane.publish()
    for actor in actors:
        assert actor.applied(manifest)["digest"] == manifest.digest
    return manifest


def pulled(actors) -> tuple[int, int]:
    """Bytes that these have pulled from the publisher, and from each other."""
    found = [actor.counters() for actor in actors]
    peers = sum(counters["peer_bytes"] for counters in found)
    return sum(counters["pulled_bytes"] for counters in found) - peers, peers


def test_a_version_leaves_the_publisher_as_often_as_its_fan_out_says(plane):
    actors = join(plane, 6)
    held_by_all(plane, actors)

    found: list[tuple[float, float]] = []
    while (FAN_OUT, len(actors) - FAN_OUT) not in found:
        assert len(found) < 4, found  # a busy machine may make a peer look silent, not every time
        before = pulled(actors)
        size = held_by_all(plane, actors).num_bytes
        after = pulled(actors)
        found.append(((after[0] - before[0]) / size, (after[1] - before[1]) / size))

    assert all(actor.counters()["digest_mismatches"] == 0 for actor in actors)
    assert listening(actors[0].pid) == {"127.0.0.1"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_those_behind_a_peer_that_is_struck_down_have_the_newest_weights(plane, number):
    actors = join(plane, 4)
    held_by_all(plane, actors)
    os.kill(actors[0].pid, number)
    plane.slowest_publish_s = 0.0

    held_by_all(plane, actors[1:])

    assert plane.slowest_publish_s < MAX_PUBLISH_S


def test_a_peer_that_lies_is_found_out_and_asked_no_more(plane):
    actors = join(plane, 5, peer_0={"lies": True})
    held_by_all(plane, actors)
    honest = actors[1:]

    first = pulled(honest)
    size = held_by_all(plane, honest).num_bytes
    second = pulled(honest)

    assert all(actor.counters()["digest_mismatches"] == 0 for actor in honest)
    # Peers 2 and 3 were to ask the liar, and ask the publisher, as 1 does; 4 asks 1.
    assert second[0] - first[0] >= 3 * size
    assert sum(second) - sum(first) == 4 * size


class Guest:
    """Somebody who pulls from a share with this key; keeps what it is answered."""

    def __init__(self, port: PeerEndpoint, folder, key: str, run: str) -> None:
        self.answers: list[object] = []
        self._news = asyncio.Event()
        self._context = zmq.asyncio.Context()
        caller = ActorIdentity(load_pair(folder, key), run, "guest")
        self.link = WeightLink(
            self._context, port, caller=caller, on_message=self._on_message, may_queue=True
        )
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            await self.link.read()
        finally:  # also where a test has failed and nobody takes leave
            self.link.close()
            self._context.destroy(linger=0)

    def _on_message(self, answer: object) -> None:
        self.answers.append(answer)
        self._news.set()

    async def next(self, timeout_s: float = 5.0) -> object:
        self._news.clear()
        async with asyncio.timeout(timeout_s):
            await self._news.wait()
        return self.answers[-1]

    async def next_of(self, pull: Pull) -> object:
        """Wait for the answer to a pull, past those to others."""
        while True:
            answer = await self.next()
            assert isinstance(answer, WeightChunk | SlicePending | VersionGone)
            if (answer.version, answer.offset) == (pull.version, pull.offset):
                return answer

    def leave(self) -> None:
        self._reading.cancel()


@asynccontextmanager
async def sharing(keys, held, neighbours=None):
    """A share that listens, and where; with `neighbours` that of a site."""
    caller = ActorIdentity(load_pair(keys, "actor"), "toy", "sharing")
    folder = keys if neighbours is None else None
    share = WeightShare(held, "tcp://127.0.0.1:0", folder=folder, caller=caller)
    if neighbours is not None:
        neighbours.append(share.admit)
    running = asyncio.create_task(share.run())
    try:
        yield await until(lambda: share.peer)
    finally:
        running.cancel()


PULL = Pull(PolicyVersion(1, 1), 0, 10)


def test_a_slice_that_is_still_on_its_way_is_sent_on_when_it_arrives(tmp_path):
    keys = keys_with_actor(tmp_path / "keys")
    held = HeldWeights()

    async def story():
        async with sharing(keys, held) as port:
            guest = Guest(port, keys, "actor", "toy")
            guest.link.post(PULL)
            assert await guest.next() == SlicePending(PULL.version, 0)
            held.begin_version(PULL.version, mmap.mmap(-1, 100))
            held.arrived(0)
            assert await guest.next() == WeightChunk(PULL.version, 0, bytes(10))
            guest.leave()

    asyncio.run(story())


def cannot_be_had(number: int) -> Pull:
    """Ask for what no actor can have: no slice, or one beyond the end."""
    odd = [(1, 10), (-CHUNK_BYTES, 10), (0, 0), (0, CHUNK_BYTES + 1), (CHUNK_BYTES, 10)]
    return Pull(PULL.version, *odd[number % len(odd)])


def far_ahead(number: int) -> Pull:
    return Pull(PolicyVersion(1, 100 + number), 0, 10)


@pytest.mark.parametrize("asked", [cannot_be_had, far_ahead])
def test_one_that_asks_for_too_much_takes_no_place_of_another(tmp_path, monkeypatch, asked):
    monkeypatch.setattr(share, "MAX_WAITING", 3)  # a port loses answers beyond 16
    keys = keys_with_actor(tmp_path / "keys")
    add(keys, "greedy", Role.ACTOR)
    held = HeldWeights()

    async def story():
        async with sharing(keys, held) as port:
            held.begin_version(PULL.version, mmap.mmap(-1, 100))
            greedy = Guest(port, keys, "greedy", "toy")
            for number in range(5):
                greedy.link.post(asked(number))
            greedy.link.post(PULL)
            assert await greedy.next_of(PULL) == SlicePending(PULL.version, 0)
            guest = Guest(port, keys, "actor", "toy")
            guest.link.post(PULL)
            assert await guest.next() == SlicePending(PULL.version, 0)
            for number in range(5, 10):
                greedy.link.post(asked(number))
            greedy.link.post(PULL)
            assert await greedy.next_of(PULL) == SlicePending(PULL.version, 0)
            held.arrived(0)
            assert await guest.next() == WeightChunk(PULL.version, 0, bytes(10))
            greedy.leave()
            guest.leave()

    asyncio.run(story())


def test_a_promise_to_one_whose_key_is_revoked_is_not_kept(tmp_path):
    keys = keys_with_actor(tmp_path / "keys")
    add(keys, "spot", Role.ACTOR)
    held = HeldWeights()

    async def story():
        async with sharing(keys, held) as port:
            revoked, guest = (Guest(port, keys, key, "toy") for key in ("spot", "actor"))
            for each in (revoked, guest):
                each.link.post(PULL)
                await each.next()
            revoke(keys, "spot")
            await asyncio.sleep(REFRESH_S + 0.5)
            held.begin_version(PULL.version, mmap.mmap(-1, 100))
            held.arrived(0)
            assert await guest.next() == WeightChunk(PULL.version, 0, bytes(10))
            revoked.leave()
            guest.leave()
            return revoked.answers

    assert asyncio.run(story()) == [SlicePending(PULL.version, 0)]


def test_a_peer_is_not_believed_when_it_says_what_is_newest(tmp_path):
    keys = keys_with_actor(tmp_path / "keys")
    held = HeldWeights()
    answers = iter([VersionReplaced(manifest(9), 0), WeightChunk(PULL.version, 0, b"x")])
    held.answer = lambda _: next(answers)  # type: ignore[assignment,method-assign,return-value]

    async def story():
        context = zmq.asyncio.Context()
        caller = ActorIdentity(load_pair(keys, "actor"), "toy", "guest")
        taken: asyncio.Queue[object] = asyncio.Queue()
        async with (
            sharing(keys, held) as port,
            PeerSource(port, context, caller).open(taken.put_nowait) as post,
            asyncio.timeout(5.0),
        ):
            post(PULL)
            post(PULL)
            first = await taken.get()
        context.destroy(linger=0)
        return first

    assert isinstance(asyncio.run(story()), WeightChunk)


def test_a_share_answers_allowed_actors_of_its_run_alone(tmp_path):
    keys = keys_with_actor(tmp_path / "keys")
    add(keys, "watcher", Role.OBSERVER)
    add(keys, "spot", Role.ACTOR)
    strange = keys_with_actor(tmp_path / "strange")

    async def story():
        async with sharing(keys, HeldWeights()) as port:
            asked = [(strange, "actor", "toy"), (keys, "watcher", "toy"), (keys, "spot", "other")]
            outside = [Guest(port, *each) for each in asked]
            inside = Guest(port, keys, "spot", "toy")
            for guest in (*outside, inside):
                guest.link.post(Join(PULL.version, False, "cpu"))  # not for a share
                guest.link.post(PULL)
            await inside.next()
            revoke(keys, "spot")
            await asyncio.sleep(REFRESH_S + 0.5)
            inside.link.post(PULL)
            await asyncio.sleep(0.3)
            for guest in (*outside, inside):
                guest.leave()
            return [len(guest.answers) for guest in (*outside, inside)]

    assert asyncio.run(story()) == [0, 0, 0, 1]


def test_a_share_of_a_site_answers_those_that_the_publisher_names_and_nobody_else(tmp_path):
    keys = keys_with_actor(tmp_path / "keys")
    add(keys, "spot", Role.ACTOR)
    add(keys, "elsewhere", Role.ACTOR)
    strange = keys_with_actor(tmp_path / "strange")
    admit: list = []

    async def story():
        async with sharing(keys, HeldWeights(), admit) as port:
            early = Guest(port, keys, "spot", "toy")
            early.link.post(PULL)
            await asyncio.sleep(0.3)
            admit[0](Neighbours((load_pair(keys, "spot").public.decode(),)))
            inside = Guest(port, keys, "spot", "toy")
            outside = [Guest(port, keys, "elsewhere", "toy"), Guest(port, strange, "actor", "toy")]
            for guest in (*outside, inside):
                guest.link.post(PULL)
            await inside.next()
            admit[0](Neighbours(()))
            inside.link.post(PULL)
            await asyncio.sleep(0.3)
            for guest in (early, *outside, inside):
                guest.leave()
            return [len(guest.answers) for guest in (early, *outside, inside)]

    assert asyncio.run(story()) == [0, 0, 0, 1]


def test_a_share_whose_authenticator_died_ends_with_its_error(tmp_path, monkeypatch):
    def broken(_self, _request):
        raise RuntimeError("the authenticator is broken")

    monkeypatch.setattr(ZapAuthenticator, "_safe_answer", broken)
    keys = keys_with_actor(tmp_path / "keys")

    async def story():
        caller = ActorIdentity(load_pair(keys, "actor"), "toy", "sharing")
        share = WeightShare(HeldWeights(), "tcp://127.0.0.1:0", folder=keys, caller=caller)
        running = asyncio.create_task(share.run())
        guest = Guest(await until(lambda: share.peer), keys, "actor", "toy")
        ended, _ = await asyncio.wait({running}, timeout=20)
        guest.leave()
        assert ended
        running.result()

    with pytest.raises(RuntimeError, match="the authenticator is broken"):
        asyncio.run(story())


def test_an_actor_that_could_let_nobody_in_says_so(tmp_path):
    keys = keys_with_actor(tmp_path / "keys")
    (keys / "allowed" / "actor" / "actor.pub").unlink()

    caller = ActorIdentity(load_pair(keys, "actor"), "toy", "sharing")
    share = WeightShare(HeldWeights(), "tcp://127.0.0.1:0", folder=keys, caller=caller)
    with pytest.raises(SettingsError, match="must hold the public keys of the actors that may"):
        asyncio.run(share.run())
