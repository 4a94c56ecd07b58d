"""The form in which a version travels to a group, and groups of real processes that are sent it."""

import mmap
from contextlib import contextmanager

import pytest
from msgspec import structs

from broker.protocol.manifest import BASE, AdapterSpec, WeightManifest
from broker.protocol.weight_messages import Ready
from buffer.record.episode import PolicyVersion
from learner.weights.log import VersionDelivery
from learner.weights.memory import WeightSlot
from learner.weights.updates import SparseChain, form_for
from tests.weights.support.adapted_toy import AdaptedToy
from tests.weights.support.plane import Plane
from tests.weights.support.published import NUM_BYTES, Published


def chain_to(folder, step: int) -> tuple[SparseChain, WeightSlot]:
    """A chain from version 1, and the newest version."""
    published = Published(folder, chain=SparseChain())
    for each in range(1, step + 1):
        published.publish(each)
    slot = published.versions.current
    assert published.versions.chain is not None and slot is not None
    return published.versions.chain, slot


def ready(held: int | None = None, base: str = "") -> Ready:
    version = PolicyVersion(1, held) if held is not None else None
    return Ready(1, PolicyVersion(1, 4), version, base)


@pytest.mark.parametrize(
    ("held", "steps"),
    [
        ((3, 3), [4]),
        ((3, 1), [2, 3, 4]),  # since the oldest: each member applies those since its own
        ((3, None), []),
        ((3, 0), []),
        ((3, 4), []),
    ],
)
def test_updates_travel_since_the_oldest_version_where_all_members_hold_one(tmp_path, held, steps):
    chain, slot = chain_to(tmp_path, 4)

    form = form_for(slot, [ready(step) for step in held], updates=chain.updates)

    assert [link.version.step for link in form.links] == steps
    if steps:
        assert form.memory == b"".join(update.payload for update in chain.updates[-len(steps) :])
    else:
        assert form.memory is slot.memory


def test_a_chain_that_does_not_lead_to_the_version_is_left_alone(tmp_path):
    chain, slot = chain_to(tmp_path, 4)
    assert not form_for(slot, [ready(1)], updates=chain.updates[:-1]).links


def test_a_chain_as_long_as_the_version_is_left_alone(tmp_path):
    chain, slot = chain_to(tmp_path, 2)
    (update,) = chain.updates
    long = structs.replace(update.link, num_bytes=NUM_BYTES)
    updates = [type(update)(long, bytes(NUM_BYTES), b"")]
    assert not form_for(slot, [ready(1)], updates=updates).links


@pytest.mark.parametrize(
    ("bases", "has_base"), [(("right", "right"), False), (("right", ""), True), (("old",), True)]
)
def test_an_adapter_travels_behind_its_base_where_a_member_lacks_that(tmp_path, bases, has_base):
    _, slot = chain_to(tmp_path, 1)
    adapter, base = b"an adapter", mmap.mmap(-1, NUM_BYTES)
    spec = AdapterSpec("right", 1, 1.0, len(adapter), (0,))
    slot = WeightSlot(
        slot.index, structs.replace(slot.manifest, adapter=spec), slot.memory, slot.path, adapter
    )

    form = form_for(slot, [ready(base=digest) for digest in bases], base=base)

    assert form.has_base == has_base
    assert [(link.base, link.num_bytes) for link in form.links] == [(BASE, len(adapter))]
    assert form.memory == (bytes(NUM_BYTES) if has_base else b"") + adapter


@contextmanager
def plane_of(folder, *, model=None, sparse=False, **options):
    """Two actors whose first version by a group is the delivery that comes with them."""
    plane = Plane(folder, ballast=200_000, model=model, sparse_weights=sparse)
    try:
        plane.publish()
        plane.actor("a", **options)
        plane.actor("b")
        for actor in plane.actors:
            actor.wait("synced", timeout_s=60.0)
        yield plane, plane.wait_until_groups_are_possible()
    finally:
        plane.close()


def delivered(plane: Plane, manifest: WeightManifest) -> VersionDelivery:
    """Wait until all actors have a version; returns its delivery."""
    for actor in plane.actors:
        assert actor.applied(manifest)["digest"] == manifest.digest
    return plane.deliveries(until=manifest.version)[-1]


@pytest.mark.slow
def test_a_group_is_sent_what_has_changed_and_all_bytes_where_too_much_has(tmp_path):
    with plane_of(tmp_path, sparse=True) as (plane, first):
        little = plane.publish_little()
        sent = delivered(plane, little)
        plane.actor("late", timeout_s=30.0).wait("synced")
        with_late = delivered(plane, plane.publish_little())
        whole = delivered(plane, plane.publish())
        counters = [actor.counters() for actor in plane.actors]

    assert (sent.members, with_late.members, whole.members) == (2, 3, 3)
    assert sent.is_complete and with_late.is_complete and whole.is_complete
    for each in (sent, with_late):
        assert 0 < each.member_bytes == each.sparse_bytes < little.num_bytes / 50
    assert first.member_bytes == whole.member_bytes == little.num_bytes
    received = [each.member_bytes for each in (first, sent, with_late, whole)]
    assert [each["group_bytes"] for each in counters] == [sum(received)] * 2 + [sum(received[2:])]
    assert not any(each["digest_mismatches"] for each in counters)


@pytest.mark.slow
def test_a_damaged_update_is_made_good_by_a_pull_of_all_bytes(tmp_path):
    with plane_of(tmp_path, sparse=True, strike="corrupt", nth=2) as (plane, _):
        before = plane.actors[0].counters()
        damaged = plane.publish_little()
        sent = delivered(plane, damaged)
        after = plane.actors[0].counters()

    assert sent.members == 2 and not sent.is_complete
    assert after["pulled_bytes"] - before["pulled_bytes"] == damaged.num_bytes
    assert after["sparse_pulls"] == before["sparse_pulls"]


@pytest.mark.slow
def test_a_group_is_sent_adapters(tmp_path):
    with plane_of(tmp_path, model=AdaptedToy(ballast=200_000)) as (plane, first):
        sent = delivered(plane, plane.publish())

    assert first.member_bytes == sent.member_bytes == sent.adapter_bytes == 256
    assert first.is_complete and sent.is_complete
