"""Registration of weights with the CUDA driver, with a stand-in for the CUDA runtime.

`tests/gpu/test_pinned_weights.py` has the real one.
"""

import ctypes
import logging
import mmap
import os

import pytest
import torch

from actors.engine.weights.pinned_files import PinnedFiles
from actors.engine.wire_tensors import named_tensors, tensors_in
from actors.weights.staging_files import StagingFiles
from broker.weights.shared_memory import SharedFolder
from configs.errors import WeightsError
from learner.weights import publish
from learner.weights.memory import NUM_SLOTS
from tests.weights.support.fake_cudart import FakeCudart
from tests.weights.support.plane import Plane
from tests.weights.support.scripted_publisher import NUM_BYTES, contents, manifest


@pytest.fixture
def cudart():
    return FakeCudart()


@pytest.fixture
def files(cudart):
    files = PinnedFiles(cudart.pins())
    yield files
    files.close()


@pytest.fixture
def slot(tmp_path):
    """In shared memory, where it is on this machine's side of the learner and its actors."""
    with SharedFolder("pins", num_bytes=4 * NUM_BYTES, fallback=tmp_path) as folder:
        path = folder.create("slot-0", NUM_BYTES)
        mapping(path)[:] = contents(1)
        yield path


def mapping(path):
    """By which the learner and its actors write; they keep it."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), NUM_BYTES)


def test_a_mapping_is_registered_and_given_back(cudart):
    pins, memory = cudart.pins(), mmap.mmap(-1, 2 * mmap.PAGESIZE)

    assert pins.pin(memory) == ""
    assert list(cudart.registered.values()) == [2 * mmap.PAGESIZE]
    pins.unpin(memory)
    pins.unpin(memory)

    assert (cudart.registered, cudart.num_forgotten) == ({}, 0)
    memory.close()  # nothing holds it


def test_a_refusal_is_said_and_its_error_is_not_left_behind(cudart):
    cudart.refuses = True
    pins = cudart.pins()

    reason = pins.pin(mmap.mmap(-1, mmap.PAGESIZE))

    assert reason == (
        f"cudaHostRegister of {mmap.PAGESIZE} bytes must return 0, got 2; they are copied as "
        "pageable memory"
    )
    pins.close()
    assert cudart.num_forgotten == 1


def test_a_file_is_registered_once_and_follows_what_is_written_to_it(cudart, files, slot):
    described = manifest(1)
    memory = mapping(slot)
    for step in (1, 2):
        memory[:] = contents(step)
        view = files.view(slot, NUM_BYTES)
        ours = dict(tensors_in(view, described.tensors, NUM_BYTES))
        theirs = dict(named_tensors(slot, described.tensors, NUM_BYTES))
        assert torch.equal(ours["w"].view(torch.int16), theirs["w"].view(torch.int16))
    assert bytes(view) == contents(2)

    assert list(cudart.registered.values()) == [NUM_BYTES]
    assert cudart.num_registered == 1
    files.close()
    assert cudart.registered == {}
    assert bytes(view) == contents(2)  # a tensor that somebody still has


def test_another_file_of_that_name_is_another(cudart, files, slot, tmp_path):
    files.view(slot, NUM_BYTES)
    slot.unlink()
    (tmp_path / "other").write_bytes(b"")  # has the inode's number, if that were free
    slot.write_bytes(contents(2))

    assert bytes(files.view(slot, NUM_BYTES)) == contents(2)

    assert len(cudart.registered) == 1  # the first is gone


def as_registered(path):
    """What would be another's if a card had to have the pages anew."""
    found = path.stat()
    return found.st_ino, found.st_ctime_ns


@pytest.mark.parametrize("cut", [os.truncate, lambda path, _: path.write_bytes(b"")])
def test_a_file_that_was_cut_off_and_written_again_is_registered_anew(cudart, files, slot, cut):
    """Its inode is the same, but its pages are others: a card would read those of before."""
    files.view(slot, NUM_BYTES)
    inode, (address,) = slot.stat().st_ino, cudart.registered
    with slot.open("r+b") as registered:  # as the driver holds the pages
        cut(slot, 0)
        os.posix_fallocate(registered.fileno(), 0, NUM_BYTES)
    mapping(slot)[:] = contents(2)

    view = files.view(slot, NUM_BYTES)

    assert slot.stat().st_ino == inode
    assert bytes(view) == contents(2)
    assert cudart.num_registered == 2
    assert list(cudart.registered) == [ctypes.addressof(view)]
    assert len(cudart.registered) == 1, f"not {address:#x} too"


def test_a_file_is_registered_anew_though_another_was_asked_for_in_between(cudart, files, slot):
    other = slot.with_name("slot-1")
    other.write_bytes(contents(1))
    files.view(slot, NUM_BYTES)
    os.truncate(slot, 0)
    os.truncate(slot, NUM_BYTES)
    files.view(other, NUM_BYTES)
    mapping(slot)[:] = contents(2)

    assert bytes(files.view(slot, NUM_BYTES)) == contents(2)

    assert cudart.num_registered == 3


def test_who_writes_never_cuts_a_file_off(tmp_path):
    """Neither the actor's staging files nor the learner's slots: pages stay, whoever has them."""
    staging = StagingFiles("pins", fallback=tmp_path)
    first = staging.acquire(NUM_BYTES)
    first.memory[:] = contents(1)
    before = as_registered(first.path)
    staging.release(first)
    again = staging.acquire(NUM_BYTES)
    again.memory[:] = contents(2)
    assert again is first
    assert as_registered(again.path) == before
    with again.path.open("rb") as held:
        staging.release(again)
        longer = staging.acquire(2 * NUM_BYTES)
        assert os.fstat(held.fileno()).st_size == NUM_BYTES, "not cut, and not made longer"
        assert os.fstat(held.fileno()).st_nlink == 0
    assert longer.path != first.path
    staging.close()
    plane = Plane(tmp_path, ballast=1000, broadcast=False)
    try:
        seen = []
        for _ in range(2):
            for _ in range(NUM_SLOTS):
                plane.publish()
            slots = plane.publisher._folder.path.glob("slot-?")
            seen.append({path: as_registered(path) for path in slots})
        assert seen[1] == seen[0]
        assert len(seen[0]) == NUM_SLOTS
    finally:
        plane.close()


def test_without_registration_the_bytes_are_the_same(cudart, files, slot, caplog):
    cudart.refuses = True
    with caplog.at_level(logging.WARNING):
        assert bytes(files.view(slot, NUM_BYTES)) == contents(1)
        assert bytes(files.view(slot, NUM_BYTES)) == contents(1)

    assert [record.message.split(":")[0] for record in caplog.records] == [
        "weights are copied slowly"
    ]


@pytest.mark.parametrize("spoil", [os.unlink, lambda path: path.write_bytes(b"short")])
def test_what_is_no_version_is_refused(cudart, files, slot, spoil):
    spoil(slot)

    with pytest.raises(WeightsError, match=r"pulls (them|the version) again"):
        files.view(slot, NUM_BYTES)
    assert cudart.registered == {}


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [False, True])
def test_the_learner_registers_its_slots_for_as_long_as_it_lives(
    tmp_path, monkeypatch, cudart, refuses
):
    cudart.refuses = refuses
    monkeypatch.setattr(publish, "_host_pins", lambda _: cudart.pins())
    plane = Plane(tmp_path, ballast=1000, broadcast=False)
    try:
        for _ in range(NUM_SLOTS + 2):
            newest = plane.publish()
        expected = [] if refuses else [newest.num_bytes] * NUM_SLOTS
        assert list(cudart.registered.values()) == expected
    finally:
        plane.close()

    assert cudart.registered == {}
    assert cudart.num_registered == len(expected)
