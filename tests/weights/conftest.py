"""One weight plane for the module, with two actors that have the first version."""

import pytest

from tests.weights.plane import Plane


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    plane = Plane(tmp_path_factory.mktemp("plane"), ballast=100_000)
    try:
        plane.publish()
        for name in ("a", "b"):
            plane.actor(name)
        for actor in plane.actors:
            actor.wait("synced", timeout_s=60.0)  # the fork server imports torch first
        plane.wait_until_groups_are_possible()
        yield plane
    finally:
        plane.close()


@pytest.fixture
def actors(plane):
    """The two actors that are always there, on the newest version."""
    return plane.actors[:2]
