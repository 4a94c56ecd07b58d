"""Sparse updates: any two arrays, any bytes, the chain of versions, and the whole path by pull."""

import mmap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.protocol.manifest import Probe, TensorSpec, WeightManifest, checksum_of, digest_of
from broker.protocol.weight_messages import CHUNK_BYTES, Pull
from broker.weights import sparse
from broker.weights.sparse import apply_changes, elements, encode_changes
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError
from learner.weights import updates
from learner.weights.memory import WeightSlot
from learner.weights.updates import SparseChain
from tests.weights.support.plane import Plane

NUM_ELEMENTS = 5000
DTYPES = ("bfloat16", "float32")


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(sparse, "SEGMENT", 700)


def random_elements(dtype: str, *, seed: int = 0) -> np.ndarray:
    size = {"bfloat16": 2, "float32": 4}[dtype]
    return elements(bytearray(np.random.default_rng(seed).bytes(size * NUM_ELEMENTS)), dtype)


def changed(old: np.ndarray, places) -> np.ndarray:
    new = old.copy()
    new[places] ^= np.random.default_rng(1).integers(
        1, np.iinfo(old.dtype).max, len(places), dtype=old.dtype
    )
    return new


@pytest.mark.parametrize("dtype", DTYPES)
@given(places=st.sets(st.integers(0, NUM_ELEMENTS - 1), max_size=300))
def test_an_update_gives_the_new_bytes_for_any_changes(dtype, places):
    old = random_elements(dtype)
    new = changed(old, sorted(places))

    update, num_changed = encode_changes(old, new)

    assert num_changed == len(places)
    if update is not None:
        apply_changes(update, old)
        assert np.array_equal(old, new)


def test_a_change_is_one_of_bits_and_not_of_numbers():
    thrice = [0.0, 1.0, np.nan]
    old, new = (
        elements(bytearray(np.array([first, *thrice[1:], *thrice * 9], "<f4").tobytes()), "float32")
        for first in (0.0, -0.0)
    )

    update, num_changed = encode_changes(old, new)

    assert update is not None and num_changed == 1
    apply_changes(update, old)
    assert old.tobytes() == new.tobytes()


def test_what_has_changed_all_over_is_not_encoded():
    old = random_elements("bfloat16")

    update, num_changed = encode_changes(old, ~old)

    assert update is None
    assert num_changed == 700  # one look was enough


@pytest.mark.parametrize("count", [200, NUM_ELEMENTS], ids=["of all", "of the first segment"])
def test_where_many_of_those_seen_have_changed_nothing_is_encoded(count):
    old = random_elements("bfloat16")[:count]

    update, num_changed = encode_changes(old, changed(old, range(0, 200, 2)))

    assert update is None and num_changed == 100


def test_one_change_in_a_hundred_costs_a_hundredth_of_the_bytes():
    rng = np.random.default_rng(2)
    old = elements(bytearray(rng.bytes(2 * 10**6)), "bfloat16")
    new = old.copy()
    new[rng.random(10**6) < 0.01] ^= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "SEGMENT", 2**20)
        update, _ = encode_changes(old, new)

    assert update is not None and len(update) < old.nbytes / 100


@given(junk=st.binary(max_size=200), cut=st.integers(0, 400), place=st.integers(0, 400))
def test_damaged_updates_are_refused_or_change_bits_and_never_raise_anything_else(junk, cut, place):
    old = random_elements("bfloat16")
    update, _ = encode_changes(old, changed(old, [3, 800, 4999]))
    assert update is not None
    damaged = bytearray(update)
    damaged[place % len(damaged)] ^= 1 + cut % 255

    for bad in (bytes(damaged), update[: cut % len(update)], update + junk, junk):
        try:
            apply_changes(bad, old.copy())
        except WeightsError as error:
            assert "must" in str(error)  # noqa: PT017 - which of the four raises is open


def slot(step: int, array: np.ndarray) -> WeightSlot:
    memory = mmap.mmap(-1, array.nbytes)
    memory[:] = array.tobytes()
    spec = TensorSpec("w", "bfloat16", array.shape, 0, array.nbytes)
    probe = Probe((1, 2), (-0.5,))
    manifest = WeightManifest(
        PolicyVersion(1, step),
        digest_of([memory]),
        checksum_of(memory),
        array.nbytes,
        (spec,),
        probe,
    )
    return WeightSlot(0, manifest, memory, Path("unused"))


def grown(chain: SparseChain, versions: int, *, per_version: int = 10) -> list[np.ndarray]:
    arrays = [random_elements("bfloat16")]
    for step in range(1, versions):
        places = np.random.default_rng(step).choice(NUM_ELEMENTS, per_version, replace=False)
        arrays.append(changed(arrays[-1], places))
    for step, array in enumerate(arrays):
        chain.advance(slot(step, array))
    return arrays


def whole(chain: SparseChain, link) -> bytes:
    slice_ = chain.read(Pull(link.version, 0, CHUNK_BYTES, link.base))
    assert slice_ is not None and len(slice_) == link.num_bytes
    return slice_


def test_the_chain_leads_from_any_of_its_versions_to_the_newest():
    chain = SparseChain()
    arrays = grown(chain, 6)
    links = [update.link for update in chain.updates]

    assert [link.base.step for link in links] == [0, 1, 2, 3, 4]
    assert all(before.version == after.base for before, after in pairwise(links))
    for begin in range(5):
        target = arrays[begin].copy()
        for link in links[begin:]:
            apply_changes(whole(chain, link), target)
        assert np.array_equal(target, arrays[5])


def test_a_chain_is_never_longer_than_a_version_nor_than_its_bound(monkeypatch):
    long = SparseChain()
    grown(long, 60, per_version=400)
    monkeypatch.setattr(updates, "MAX_LINKS", 3)
    bounded = SparseChain()
    grown(bounded, 9)

    assert sum(update.link.num_bytes for update in long.updates) < 2 * NUM_ELEMENTS
    assert 1 < len(long.updates) < 59
    assert [update.link.version.step for update in bounded.updates] == [6, 7, 8]


def test_a_version_that_changes_all_over_begins_a_new_chain():
    chain = SparseChain()
    arrays = grown(chain, 3)

    change = chain.advance(slot(3, ~arrays[-1]))

    assert change is not None and change.num_bytes == 0 and change.density > 0.1
    assert not chain.updates
    newest = changed(~arrays[-1], [7])
    chain.advance(slot(4, newest))
    (update,) = chain.updates
    target = ~arrays[-1]
    apply_changes(whole(chain, update.link), target)
    assert np.array_equal(target, newest)


def test_a_link_that_is_not_there_is_answered_by_nothing():
    chain = SparseChain()
    grown(chain, 3)

    for base, version, offset in ((0, 2, 0), (5, 6, 0), (0, 1, 10**9), (0, 1, -1)):
        pull = Pull(PolicyVersion(1, version), offset, 100, PolicyVersion(1, base))
        assert chain.read(pull) is None


@pytest.mark.slow
def test_actors_follow_by_sparse_updates_and_get_the_same_bytes(tmp_path):
    plane = Plane(tmp_path, ballast=200_000, broadcast=False, sparse_weights=True)
    try:
        plane.publish()
        actor = plane.actor("follower")
        actor.wait("synced", timeout_s=60.0)
        for _ in range(3):
            manifest = plane.publish_little()
            assert actor.applied(manifest)["digest"] == manifest.digest
        all_over = plane.publish()
        assert actor.applied(all_over)["digest"] == all_over.digest
        counters = actor.counters()
        found = plane.deliveries(until=all_over.version)
    finally:
        plane.close()

    assert (counters["pulls"], counters["sparse_pulls"]) == (5, 3)
    assert counters["digest_mismatches"] == 0
    assert [bool(sent.sparse_bytes) for sent in found] == [False, True, True, True, False]
    assert all(sent.density < 0.01 for sent in found[1:4])
