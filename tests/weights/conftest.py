"""One weight plane for the module, with two actors that have the first version."""

import pytest

from tests.weights.support.plane import grouped_plane


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    with grouped_plane(tmp_path_factory.mktemp("plane"), {"a": {}, "b": {}}) as plane:
        yield plane


@pytest.fixture
def actors(plane):
    """The two actors that are always there, on the newest version."""
    return plane.actors[:2]
