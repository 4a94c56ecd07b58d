"""Versions read from the publisher's memory: by one reader, by a transfer, by processes."""

import asyncio
import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from actors.weights import publisher_memory
from actors.weights.counters import WeightCounters
from actors.weights.publisher_memory import BUCKET_BYTES, PublisherMemory
from broker.protocol.manifest import checksum_of
from broker.protocol.weight_messages import Announce, Join, Moved
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError
from learner.weights.server import WeightServer
from learner.weights.slots import Slots
from learner.weights.sparse_chain import SparseChain
from tests.weights.support.plane import grouped_plane
from tests.weights.support.scripted_publisher import ScriptedPublisher, contents, manifest, play

NUM_BYTES = 2 * BUCKET_BYTES + 12345
READERS = ("memory", "publisher")


@pytest.fixture
def sealed(tmp_path):
    """A version's file, its manifest, and memory for it."""
    path, whole = tmp_path / "slot-0.taken", os.urandom(NUM_BYTES)
    path.write_bytes(whole)
    described = structs.replace(manifest(1), num_bytes=NUM_BYTES, checksum=checksum_of(whole))
    return path, described, mmap.mmap(-1, NUM_BYTES)


def memory_of_publisher() -> PublisherMemory:
    return PublisherMemory(WeightCounters())


def maps_of(path) -> int:
    """How often this process has a file mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(str(path)) for line in lines)


def test_a_version_is_read_whole(sealed):
    path, described, memory = sealed

    assert memory_of_publisher().can_fetch(Announce(described, 0, memory=str(path)))
    memory_of_publisher().read(str(path), described, memory)

    assert memory[:] == path.read_bytes()


def test_a_slot_is_mapped_once_and_let_go_of_with_its_folder(sealed, tmp_path):
    path, described, memory = sealed
    publisher = memory_of_publisher()
    publisher.read(str(path), described, memory)
    path = path.rename(tmp_path / "slot-0.ready").rename(path)  # the same slot, a version later
    publisher.read(str(path), described, memory)
    assert maps_of(path) == 1

    next_life = tmp_path / "next" / path.name
    next_life.parent.mkdir()
    next_life.write_bytes(path.read_bytes())
    publisher.read(str(next_life), described, memory)

    assert (maps_of(path), maps_of(next_life)) == (0, 1)


def test_what_is_written_to_while_it_is_read_is_refused(sealed, monkeypatch):
    path, described, memory = sealed
    copy, copied = np.copyto, []

    def overtaken(target, source):
        copied.append(len(target))
        if len(copied) == 2:
            with path.open("r+b") as writing:
                writing.seek(NUM_BYTES - 1)
                writing.write(bytes([path.read_bytes()[-1] ^ 1]))
        copy(target, source)

    monkeypatch.setattr(np, "copyto", overtaken)

    with pytest.raises(WeightsError, match="checksum must be"):
        memory_of_publisher().read(str(path), described, memory)
    assert len(copied) == 3


def test_a_file_of_another_length_is_refused(sealed):
    path, described, memory = sealed
    path.write_bytes(b"short")

    with pytest.raises(WeightsError, match=f"must be a file of {NUM_BYTES} bytes"):
        memory_of_publisher().read(str(path), described, memory)


def test_neither_links_nor_pipes_are_read(sealed, tmp_path):
    path, described, memory = sealed
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe)

    for refused in (link, pipe):
        with pytest.raises(WeightsError, match="must be"):
            memory_of_publisher().read(str(refused), described, memory)


def test_nothing_can_be_read_where_nothing_is_named():
    for path in ("", "/dev/shm/nyala-slots-of-another-machine/slot-0.taken"):
        assert not memory_of_publisher().can_fetch(Announce(manifest(1), 0, memory=path))


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
    path = tmp_path / "slot-1.taken"
    path.write_bytes(contents(1))

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
    gone, newer = tmp_path / "slot-0.taken", tmp_path / "slot-1.taken"
    gone.write_bytes(contents(1))
    newer.write_bytes(contents(2))
    monkeypatch.setattr(
        publisher, "_reply", lambda pull: publisher.answer(Moved(manifest(2), 0, memory=str(newer)))
    )

    async def story(stage):
        stage.transfer.on_message(Announce(manifest(1), 0, memory=str(gone)))
        gone.unlink()
        await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert [staged.version.step for staged in stage.staged] == [2]
    assert stage.transfer.counters.memory_reads == 1


class SlowChain(SparseChain):
    """Compares for as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def advance(self, slot):
        assert self.may_end.wait(10.0)
        return super().advance(slot)


def test_readers_are_told_before_versions_are_compared(tmp_path, monkeypatch):
    chain, told, all_told = SlowChain(), [], asyncio.Event()
    unused: Any = None

    def note(route, announce):
        told.append((route, announce.memory))
        if len(told) == 2:
            all_told.set()

    async def story():
        slots = Slots(tmp_path)
        slots.path(0, "writing").write_bytes(contents(1))
        slots.seal(0, manifest(1))
        server = WeightServer(
            unused, slots, run="toy", broadcast=None, chain=chain, report=lambda sent: None
        )
        monkeypatch.setattr(server._port, "post", note)
        for actor, reads in (("near", True), ("far", False)):
            join = Join(PolicyVersion(-1, -1), False, "cpu", reads_memory=reads)
            server._on_message(actor.encode(), f"key of {actor}", actor, join)
        carrying = asyncio.create_task(server._deliver_all())
        await asyncio.sleep(0.1)
        assert [route for route, _ in told] == [b"near"]
        chain.may_end.set()
        await all_told.wait()
        carrying.cancel()

    asyncio.run(asyncio.wait_for(story(), 10.0))

    place = str(tmp_path / "slot-0.taken")
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
