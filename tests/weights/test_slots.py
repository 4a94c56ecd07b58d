"""Slots between learner and publisher, and the versions on offer to pulls."""

import mmap

import pytest

from broker.protocol.manifest import Probe, TensorSpec, WeightManifest
from broker.protocol.weight_messages import CHUNK_BYTES, Pull
from broker.weights.seal import Seal
from buffer.record.episode import PolicyVersion
from learner.weights.memory import NUM_SLOTS, WeightSlot, WeightSlots
from learner.weights.pull import PULL_IDLE_S, VersionsOnOffer
from tests.learner.support.listening import without_files

NUM_BYTES = CHUNK_BYTES + 8


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Learner:
    """The producer's side: seals versions whose bytes are their step number."""

    def __init__(self, folder) -> None:
        self.slots = WeightSlots(folder)
        for index in range(NUM_SLOTS):
            self.slots.path(index).write_bytes(bytes(NUM_BYTES))
            self.slots.add(index)

    def seal(self, step: int) -> None:
        index = self.slots.acquire()
        with self.slots.path(index).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        memory[:] = bytes([step]) * NUM_BYTES
        self.slots.seal(index, manifest(step))


def manifest(step: int) -> WeightManifest:
    return WeightManifest(
        version=PolicyVersion(1, step),
        digest=f"{step}",
        checksum="",
        num_bytes=NUM_BYTES,
        tensors=(TensorSpec("w", "float32", (NUM_BYTES // 4,), 0, NUM_BYTES),),
        probe=Probe((1, 2), (-0.5,)),
    )


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def on_offer(tmp_path, learner, clock):
    return VersionsOnOffer(WeightSlots(tmp_path), clock=clock)


def take(publisher: WeightSlots) -> WeightSlot:
    slot = publisher.take_sealed_slot()
    assert slot is not None
    return slot


def pull(step: int, offset: int = 0) -> Pull:
    return Pull(PolicyVersion(1, step), offset, CHUNK_BYTES)


def test_a_sealed_version_is_taken_once(learner, tmp_path):
    publisher = WeightSlots(tmp_path)
    learner.seal(1)

    taken = take(publisher)

    assert taken.manifest == manifest(1)
    assert taken.memory[:] == bytes([1]) * NUM_BYTES
    assert publisher.take_sealed_slot() is None


def test_a_version_that_cannot_be_opened_is_taken_later(learner, tmp_path, on_offer):
    learner.seal(1)

    with without_files(), pytest.raises(OSError, match="Too many open files"):
        on_offer.advance()
    for step in (2, 3, 4, 5):  # there is room for them
        learner.seal(step)

    assert on_offer.advance().manifest == manifest(5)
    assert WeightSlots(tmp_path).take_sealed_slot() is None


def test_the_newest_replaces_a_version_that_nobody_took(learner, tmp_path):
    for step in (1, 2, 3, 4):
        learner.seal(step)

    publisher = WeightSlots(tmp_path)

    assert take(publisher).manifest == manifest(4)
    assert publisher.take_sealed_slot() is None


def test_the_learner_never_waits_for_a_publisher_that_stands_still(learner, tmp_path):
    publisher = WeightSlots(tmp_path)
    learner.seal(1)
    publisher.take_sealed_slot()
    learner.seal(2)
    publisher.take_sealed_slot()

    for step in range(3, 20):
        learner.seal(step)

    assert take(publisher).manifest == manifest(19)


def test_a_version_lies_there_while_the_next_two_are_written(learner, tmp_path):
    publisher = WeightSlots(tmp_path)
    seals = [Seal(learner.slots.path(index)) for index in range(NUM_SLOTS)]
    announced: list[tuple[WeightSlot, int]] = []

    for step in range(1, 12):
        learner.seal(step)
        assert [seals[slot.index].number for slot, _ in announced[-2:]] == [
            number for _, number in announced[-2:]
        ]
        if announced:
            publisher.free(announced[-1][0])
        slot = take(publisher)
        announced.append((slot, seals[slot.index].number))


def test_a_seal_is_open_while_the_learner_writes(learner):
    index = learner.slots.acquire()
    seal = Seal(learner.slots.path(index))
    assert (seal.number, seal.is_open) == (1, True)

    learner.slots.seal(index, manifest(1))

    assert (seal.number, seal.is_open) == (2, False)


def test_a_dead_publisher_leaves_the_newest_version_to_the_next(learner, tmp_path):
    dead = WeightSlots(tmp_path)
    learner.seal(1)
    dead.take_sealed_slot()
    learner.seal(2)
    dead.take_sealed_slot()

    learner.slots.reclaim()

    assert take(WeightSlots(tmp_path)).manifest == manifest(2)
    assert sum(learner.slots.mark(i, "free").exists() for i in range(NUM_SLOTS)) == 2


def test_a_version_sealed_while_the_publisher_was_dead_wins_over_what_it_held(learner, tmp_path):
    dead = WeightSlots(tmp_path)
    learner.seal(1)
    dead.take_sealed_slot()
    learner.seal(2)

    learner.slots.reclaim()

    successor = WeightSlots(tmp_path)
    assert take(successor).manifest == manifest(2)
    assert successor.take_sealed_slot() is None


def test_the_on_offer_offers_the_newest_version(learner, on_offer):
    learner.seal(1)
    assert on_offer.advance().manifest == manifest(1)
    learner.seal(2)
    assert on_offer.advance().manifest == manifest(2)
    assert on_offer.advance() is None

    assert on_offer.read("a", pull(1)) is None
    assert on_offer.read("a", pull(2)) == bytes([2]) * CHUNK_BYTES
    assert on_offer.read("a", pull(2, CHUNK_BYTES)) == bytes([2]) * 8
    assert on_offer.read("a", pull(2, NUM_BYTES)) is None
    assert on_offer.read("a", pull(2, -1)) is None


def test_a_version_stays_while_somebody_pulls_it_and_no_longer(learner, on_offer):
    learner.seal(1)
    on_offer.advance()
    on_offer.read("slow", pull(1))

    for step in (2, 3, 4):
        learner.seal(step)
        on_offer.advance()
    assert on_offer.read("slow", pull(1, CHUNK_BYTES)) == bytes([1]) * 8  # its last slice

    learner.seal(5)
    on_offer.advance()
    assert on_offer.read("slow", pull(1)) is None


def test_a_puller_that_died_does_not_keep_its_version_for_ever(learner, on_offer, clock):
    learner.seal(1)
    on_offer.advance()
    on_offer.read("dead", pull(1))
    learner.seal(2)
    on_offer.advance()
    clock.now += PULL_IDLE_S + 1

    learner.seal(3)
    on_offer.advance()

    assert on_offer.read("dead", pull(1)) is None
