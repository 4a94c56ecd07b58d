"""A run in a real store, with small groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from buffer.store import Store
from tests.buffer.support.run_in_store import RunInStore


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    """The store of a run that has not begun."""
    with Store(redis_url, "run") as store:
        yield store


@pytest.fixture
def run(store: Store, redis_url: str) -> Iterator[RunInStore]:
    """A run with a learner: groups of 4, 2 units per batch, lag at most 1."""
    with RunInStore(store, redis_url) as run:
        yield run
