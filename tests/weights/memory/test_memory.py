"""Versions used where they lie in the publisher's memory: by one reader, a transfer, processes."""

import asyncio
import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from xxhash import xxh3_128

from actors.engine.engine import StagedWeights
from actors.weights import memory as publisher_memory
from actors.weights.counters import WeightCounters
from actors.weights.held import HeldWeights
from actors.weights.memory import BUCKET_BYTES, PublisherMemory
from actors.weights.receiver import WeightReceiver
from benchmarks.support.shared_files import shared_files
from broker.protocol.manifest import checksum_of
from broker.protocol.weight_messages import Announce, Join, Pull, VersionReplaced, WeightChunk
from broker.weights.port import Route
from broker.weights.seal import Seal, seal_of
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsOverwritten
from configs.settings import ActorSettings
from learner.weights.memory import NUM_SLOTS, WeightSlots
from learner.weights.server import WeightServer
from learner.weights.updates import SparseChain
from tests.waiting import until
from tests.weights.support.plane import Plane, grouped_plane
from tests.weights.support.scripted_publisher import (
    CALLER,
    ScriptedPublisher,
    contents,
    manifest,
    play,
)
from tests.weights.support.toy_model import ToyEngine

NUM_BYTES = 2 * BUCKET_BYTES + 12345
READERS = ("memory", "publisher")
BALLAST = 4_000_000  # 16 MB a version
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def sealed(tmp_path):
    """A sealed slot of a version's bytes, and what announces it."""
    return slot_of(tmp_path / "slot-0", os.urandom(NUM_BYTES))


def slot_of(path, whole: bytes, step: int = 1):
    path.write_bytes(whole)
    seal_of(path).write_bytes((2).to_bytes(8, "little"))
    described = structs.replace(manifest(step), num_bytes=len(whole), checksum=checksum_of(whole))
    return path, Announce(described, 0, memory=str(path))


def borrow(news, publisher=None):
    publisher = publisher or PublisherMemory(WeightCounters())
    return asyncio.run(publisher.borrow(news))


def maps_of(path) -> int:
    """How often this process has a file mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(str(path)) for line in lines)


def test_a_version_is_used_where_it_lies(sealed):
    path, news = sealed

    assert PublisherMemory(WeightCounters()).can_fetch(news)
    borrowed = borrow(news)

    assert borrowed.memory[:] == borrowed.path.read_bytes() == path.read_bytes()
    with pytest.raises(TypeError):
        borrowed.memory[0] = 0  # it is the learner's
    assert borrowed.is_whole()


def test_the_path_for_the_engine_is_good_when_the_learner_has_ended(sealed):
    path, news = sealed
    whole = path.read_bytes()
    borrowed = borrow(news)

    path.unlink()
    seal_of(path).unlink()

    assert borrowed.path.read_bytes() == whole
    assert borrowed.is_whole()


def test_a_slot_is_mapped_once_and_let_go_of_with_its_folder(sealed, tmp_path):
    path, news = sealed
    publisher = PublisherMemory(WeightCounters())
    first = borrow(news, publisher)
    assert borrow(news, publisher).memory is first.memory
    assert maps_of(path) == 1

    (tmp_path / "next").mkdir()
    next_life, next_news = slot_of(tmp_path / "next" / path.name, os.urandom(NUM_BYTES))
    second = borrow(next_news, publisher)

    # What is still being applied stays, and its name cannot become another file's.
    assert (maps_of(path), maps_of(next_life)) == (1, 1)
    assert first.path.read_bytes() == path.read_bytes()
    name = first.path
    del first
    assert not name.exists() or name.readlink() != path
    assert (maps_of(path), maps_of(next_life)) == (0, 1)
    assert second.path.exists()


def test_the_next_version_in_a_slot_makes_the_last_one_known_as_gone(sealed):
    path, news = sealed
    borrowed = borrow(news)
    weights = StagedWeights(borrowed.path, news.manifest, borrowed.is_whole)
    weights.check_not_overwritten()

    Seal(path, is_writer=True).open()

    assert not borrowed.is_whole()
    with pytest.raises(WeightsOverwritten, match="got newer ones in their place"):
        weights.check_not_overwritten()
    assert borrow(news) is None  # while it is written to
    Seal(path, is_writer=True).close()
    assert not borrowed.is_whole()
    assert borrow(news) is not None  # the same bytes: that version, again


def test_what_is_written_to_while_it_is_read_is_refused(sealed, monkeypatch):
    path, news = sealed
    read: list[int] = []

    class Overtaken:
        """A checksum in the midst of which the learner comes and writes the same bytes again."""

        def __init__(self):
            self.found = xxh3_128()

        def update(self, bucket):
            read.append(len(bucket))
            if len(read) == 2:
                Seal(path, is_writer=True).open()
            self.found.update(bucket)

        def hexdigest(self):
            return self.found.hexdigest()

    monkeypatch.setattr(publisher_memory, "xxh3_128", Overtaken)

    assert borrow(news) is None
    assert len(read) == 3


def make_pipe(path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"short"),
        lambda path: path.write_bytes(bytes(NUM_BYTES)),
        lambda path: seal_of(path).unlink(),
        lambda path: seal_of(path).write_bytes(b""),
        lambda path: path.rename(path.with_name("other")) and path.symlink_to("other"),
        make_pipe,
    ],
    ids=["short", "other bytes", "no seal", "empty seal", "link", "pipe"],
)
def test_what_is_not_a_sealed_file_of_the_version_is_refused(sealed, spoil):
    path, news = sealed
    spoil(path)

    assert borrow(news) is None


def test_nothing_can_be_read_where_nothing_is_named():
    for path in ("", "/dev/shm/nyala-slots-of-another-machine/slot-0"):
        assert not PublisherMemory(WeightCounters()).can_fetch(
            Announce(manifest(1), 0, memory=path)
        )


@pytest.fixture
def publisher():
    return ScriptedPublisher()


@pytest.fixture(params=[0, NUM_BYTES], ids=["in a thread", "at once"])
def _thread(request, monkeypatch):
    monkeypatch.setattr(publisher_memory, "SHORT_BYTES", request.param)


@pytest.mark.parametrize(
    ("found", "reads", "asked"),
    [(contents(1), 1, False), (contents(2), 0, True), (b"short", 0, True), (None, 0, True)],
    ids=["right", "overtaken", "short", "gone"],
)
@pytest.mark.usefixtures("_thread")
def test_what_memory_does_not_have_is_pulled(publisher, tmp_path, found, reads, asked):
    path, _ = slot_of(tmp_path / "slot-1", contents(1))

    async def story(stage):
        stage.transfer.on_message(Announce(manifest(1), 0, memory=str(path)))
        assert stage.transfer.reads_memory
        path.unlink() if found is None else path.write_bytes(found)
        await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert stage.bytes == [contents(1)]
    counters = stage.transfer.counters
    assert (counters.memory_reads, counters.pulls) == (reads, 1 - reads)
    assert bool(publisher.asked) is asked


def test_a_version_that_moved_is_read_where_the_newer_one_is(publisher, tmp_path, monkeypatch):
    gone, _ = slot_of(tmp_path / "slot-0", contents(1))
    newer, _ = slot_of(tmp_path / "slot-1", contents(2), step=2)
    monkeypatch.setattr(
        publisher,
        "_reply",
        lambda pull: publisher.answer(VersionReplaced(manifest(2), 0, memory=str(newer))),
    )

    async def story(stage):
        stage.transfer.on_message(Announce(manifest(1), 0, memory=str(gone)))
        gone.unlink()
        await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert [staged.version.step for staged in stage.staged] == [2]
    assert stage.transfer.counters.memory_reads == 1


def test_peers_are_not_given_what_was_overwritten():
    held, looks = HeldWeights(), [True, False, False]
    version, memory = PolicyVersion(1, 1), mmap.mmap(-1, 4096)
    pull = Pull(version, 0, 16)
    held.hold(version, memory, is_whole=lambda: True)
    assert held.answer(pull) == WeightChunk(version, 0, bytes(16))
    assert held.whole == (version, memory)

    held.hold(version, memory, is_whole=lambda: looks.pop(0))  # while it is copied for the answer
    assert not isinstance(held.answer(pull), WeightChunk)
    held.hold(version, memory, is_whole=lambda: False)
    assert not isinstance(held.answer(pull), WeightChunk)
    assert held.whole is None


def test_a_version_that_was_overwritten_behind_the_gate_is_fetched_again(
    sealed, tmp_path, monkeypatch
):
    path, news = sealed
    arrived, opens = asyncio.Event(), asyncio.Event()

    async def gate():
        arrived.set()
        await opens.wait()

    async def story():
        engine = ToyEngine()
        asked: list[StagedWeights] = []
        monkeypatch.setattr(engine, "read", asked.append)
        receiver = WeightReceiver(
            engine, ActorSettings(), caller=CALLER, staging=tmp_path, gate=gate
        )
        transfer, fetched = receiver._transfer, asyncio.Event()
        monkeypatch.setattr(transfer, "fetch_again", lambda **_: fetched.set())
        borrowed = await PublisherMemory(WeightCounters()).borrow(news)
        assert borrowed is not None
        transfer._hand_over(news.manifest, borrowed)
        applying = asyncio.create_task(receiver._apply_all())
        await arrived.wait()
        Seal(path, is_writer=True).open()
        opens.set()
        await fetched.wait()
        applying.cancel()
        return asked, receiver

    asked, receiver = asyncio.run(asyncio.wait_for(story(), 10.0))

    assert asked == []
    assert not receiver.is_dirty  # it goes on with what it has
    assert receiver.counters.overwritten == 1


class SlowChain(SparseChain):
    """Compares for as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_end = threading.Event(), threading.Event()

    def advance(self, slot):
        self.began.set()
        assert self.may_end.wait(10.0)
        return super().advance(slot)


def test_readers_are_told_before_versions_are_compared(tmp_path, monkeypatch):
    chain, told, all_told = SlowChain(), [], asyncio.Event()
    unused: Any = None

    def note(route, announce):
        told.append((route.id, announce.memory))
        if len(told) == 2:
            all_told.set()

    async def story():
        slots = WeightSlots(tmp_path)
        slots.path(0).write_bytes(contents(1))
        slots.add(0)
        assert slots.acquire() == 0
        slots.seal(0, manifest(1))
        server = WeightServer(
            unused, slots, run="toy", broadcast=None, chain=chain, report=lambda sent: None
        )
        monkeypatch.setattr(server._port, "post", note)
        for actor, reads in (("near", True), ("far", False)):
            join = Join(PolicyVersion(-1, -1), False, "cpu", reads_memory=reads)
            server._on_message(Route(actor.encode()), f"key of {actor}", actor, join)
        carrying = asyncio.create_task(server._deliver_all())
        await until(chain.began.is_set)
        assert [route for route, _ in told] == [b"near"]
        chain.may_end.set()
        await all_told.wait()
        carrying.cancel()

    asyncio.run(asyncio.wait_for(story(), 10.0))

    place = str(tmp_path / "slot-0")
    assert told == [(b"near", place), (b"far", place)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    """Two actors that read, beside one that is in groups."""
    near = {"pull_from": READERS}
    actors = {"a": near, "b": near, "far": {}}
    with grouped_plane(tmp_path_factory.mktemp("memory"), actors) as plane:
        yield plane


@pytest.fixture
def actors(plane):
    return plane.actors[:3]


@pytest.mark.slow
def test_readers_have_each_version_without_a_group_or_a_pull(plane, actors):
    before = [actor.counters() for actor in actors]

    for _ in range(5):
        newest = plane.publish()
        for actor in actors:
            assert actor.applied(newest)["digest"] == newest.digest

    assert {sent.members for sent in plane.deliveries(until=newest.version)[-5:]} == {1}
    *near, far = [
        {name: count - before[name] for name, count in actor.counters().items() if name != "event"}
        for actor, before in zip(actors, before, strict=True)
    ]
    for counted in near:
        assert (counted["memory_reads"], counted["broadcasts"], counted["pulls"]) == (5, 0, 0)
    assert (far["memory_reads"], far["broadcasts"], far["pulls"]) == (0, 5, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_reader_struck_down_delays_nobody(plane, actors, number):
    victim = plane.actor(f"victim-{number.name}", pull_from=READERS)
    victim.wait("synced")
    os.kill(victim.pid, number)

    newest = plane.publish()

    for actor in actors:
        actor.applied(newest, timeout_s=2.0)  # a group would wait for its deadline
    victim.end()


@pytest.mark.slow
def test_readers_go_on_with_the_next_publisher(plane, actors):
    os.kill(plane.publisher_pid, signal.SIGKILL)
    newest = plane.publish()

    for actor in actors:
        actor.applied(newest, timeout_s=30.0)
    read = actors[0].counters()["memory_reads"]
    actors[0].applied(plane.publish())
    assert actors[0].counters()["memory_reads"] == read + 1


@pytest.mark.slow
def test_a_version_that_is_overwritten_while_it_is_read_is_never_served(plane, actors):
    last = plane.step + 1
    slow = plane.actor("slow", pull_from=READERS, stops_at=last)
    slow.wait("synced")
    unlucky = plane.publish()
    slow.wait("halfway")

    for _ in range(4):  # into its slot as well
        newest = plane.publish()
        actors[0].applied(newest)
    os.kill(slow.pid, signal.SIGCONT)

    slow.applied(newest)
    counted = slow.counters()
    assert (counted["overwritten"], counted["probe_mismatches"]) == (1, 0)
    assert unlucky.version not in [
        line["version"] for line in slow.lines if line["event"] == "applied"
    ]
    slow.end()


@pytest.mark.slow
def test_an_engine_that_is_left_with_a_mixture_twice_is_given_a_copy(plane):
    unlucky = plane.actor("unlucky", pull_from=READERS, overwritten=2)
    unlucky.wait("synced")

    counted = unlucky.counters()
    assert (counted["overwritten"], counted["memory_reads"], counted["pulls"]) == (2, 2, 1)
    newest = plane.publish()
    unlucky.applied(newest)
    counted = unlucky.counters()
    assert (counted["overwritten"], counted["memory_reads"], counted["pulls"]) == (2, 3, 1)
    unlucky.end()


@pytest.mark.slow
def test_a_machine_holds_the_learners_slots_and_no_bytes_for_an_actor(tmp_path):
    plane = Plane(tmp_path, ballast=BALLAST, broadcast=False)
    try:
        plane.publish()
        actors = [plane.actor(f"actor-{n}", pull_from=READERS) for n in range(3)]
        for actor in actors:
            actor.wait("synced", timeout_s=60.0)
        for _ in range(4):  # every slot has been read
            newest = plane.publish()
            for actor in actors:
                actor.applied(newest)

        num_bytes = newest.num_bytes
        held = [shared_files(actor.pid) for actor in actors]
        learner, sidecar = shared_files(os.getpid()), shared_files(plane.publisher_pid)
    finally:
        plane.close()

    slots = {plane.publisher._folder.path / f"slot-{index}" for index in range(NUM_SLOTS)}
    for mapped in held:
        weights = {path: count for path, count in mapped.items() if path.suffix != ".seal"}
        assert set(weights) == slots
        assert all(count["Private_Dirty"] == 0 for count in weights.values())
    # Shared pages count in equal parts with each process that has them mapped.
    all_processes = [*held, learner, sidecar]
    folder = plane.publisher._folder.path
    pss = sum(
        count["Pss"]
        for mapped in all_processes
        for path, count in mapped.items()
        if path.is_relative_to(folder)
    )
    assert NUM_SLOTS * num_bytes <= pss <= NUM_SLOTS * (num_bytes + 2 * PAGE)
