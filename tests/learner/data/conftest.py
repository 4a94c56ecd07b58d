"""A learner's run in a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer import operations
from buffer.store import Store
from tests.learner.support.claims_bench import Bench
from tests.learner.support.tiny_run import begin_run, tiny_settings


@pytest.fixture
def bench(redis_url: str, tmp_path: Path) -> Iterator[Bench]:
    settings = tiny_settings(tmp_path)
    store = Store(redis_url, settings.run.name)
    begin_run(store, settings.run)
    lineage = store.run(operations.begin_lineage(0, 0))
    assert lineage is not None
    yield Bench(store, redis_url, settings, lineage)
    store.close()
