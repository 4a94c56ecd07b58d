"""A site of actors as processes: real ports, real CURVE, real deaths, and one that lies."""

import os
import signal

import pytest

from broker.transport.allow_list import Role, add
from tests.weights.support.plane import MAX_PUBLISH_S, Plane

pytestmark = pytest.mark.slow

BALLAST = 300_000  # 1.2 MB, of which a step changes one weight in a thousand


@pytest.fixture
def plane(tmp_path):
    plane = Plane(tmp_path, ballast=BALLAST, broadcast=False, sparse_weights=True)
    try:
        plane.publish()
        yield plane
    finally:
        plane.close()


def site_of(plane, *names: str, **odd):
    """Actors of one site that come one after the other, each with a key of its own."""
    for name in names:
        add(plane.keys, name, Role.ACTOR)
        options = {"key": name, "shares": True, "site": "eu", **odd.get(name, {})}
        plane.actor(name, **options).wait("synced", timeout_s=60.0)
    return plane.actors[-len(names) :]


def held_by_all(plane, actors):
    manifest = plane.publish_little()
    for actor in actors:
        assert actor.applied(manifest)["digest"] == manifest.digest
    return manifest


def counted(actors) -> dict[str, int]:
    """Bytes that crossed the link to the site, bytes within it, and pulls, over all actors."""
    found = [actor.counters() for actor in actors]
    total = {name: sum(each[name] for each in found) for name in found[0] if name != "event"}
    return {
        "over_link": total["pulled_bytes"] - total["peer_bytes"],
        "within": total["peer_bytes"],
        "sparse": total["sparse_pulls"],
        "mismatches": total["digest_mismatches"],
    }


def since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before}


def update_bytes(plane: Plane, manifest) -> int:
    return plane.deliveries(until=manifest.version)[-1].sparse_bytes


def test_a_site_fetches_each_version_once_and_who_joins_late_takes_it_there(plane):
    actors = site_of(plane, "a", "b", "c")
    assert counted(actors)["over_link"] == plane.publisher._num_bytes
    before = counted(actors)

    update = update_bytes(plane, held_by_all(plane, actors))

    assert 0 < update < 20_000
    found = since(before, counted(actors))
    assert found == {"over_link": update, "within": 2 * update, "sparse": 3, "mismatches": 0}
    (late,) = site_of(plane, "late")
    assert counted([late])["over_link"] == 0
    before = counted([late])
    update = update_bytes(plane, held_by_all(plane, [*actors, late]))
    found = since(before, counted([late]))
    assert found == {"over_link": 0, "within": update, "sparse": 1, "mismatches": 0}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_when_the_fetching_actor_is_struck_down_one_other_fetches_in_its_place(plane, number):
    first, *others = site_of(plane, "a", "b", "c", "d")
    held_by_all(plane, others)
    before = counted(others)
    os.kill(first.pid, number)
    plane.slowest_publish_s = 0.0

    update = update_bytes(plane, held_by_all(plane, others))

    found = since(before, counted(others))
    assert found == {"over_link": update, "within": 2 * update, "sparse": 3, "mismatches": 0}
    assert plane.slowest_publish_s < MAX_PUBLISH_S


def test_a_fetching_actor_that_lies_is_found_out_at_its_first_update_and_asked_no_more(plane):
    honest = site_of(plane, "liar", "b", "c", liar={"lies": True})[1:]
    before = counted(honest)

    updates = [update_bytes(plane, held_by_all(plane, honest)) for _ in range(2)]

    found = since(before, counted(honest))
    assert found == {
        "over_link": sum(updates),  # fetched by b, and once
        "within": sum(updates),
        "sparse": 4,  # no version had to be sent whole
        "mismatches": 0,
    }
