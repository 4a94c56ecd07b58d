"""The broker's page: the store's counts, and whether the broker can work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.metrics_page import METRICS, BrokerPage
from broker.server.dispatch import assemble
from buffer import operations
from buffer.store import AsyncStore, Store
from configs.settings import Settings
from tests.learner.support.tiny_run import begin_run, tiny_settings
from tests.waiting import until

NOBODY = "redis://127.0.0.1:1/0"
START = "waits for its start"


def settings(folder: Path) -> Settings:
    base = tiny_settings(folder)
    served = base.broker.model_copy(update={"metrics_endpoint": "http://127.0.0.1:0"})
    return base.model_copy(update={"broker": served})


async def look(plan: Settings, url: str) -> BrokerPage:
    """Serve until the store was asked once."""
    store = AsyncStore(url, run=plan.run.name)
    page = BrokerPage(assemble(plan, store, audit_file=None), store, plan)
    assert page.health.not_ready() == START
    try:
        async with asyncio.timeout(60), page.serving():
            await until(lambda: page.health.not_ready() != START)
    finally:
        await store.close()
    return page


def test_a_page_has_the_stores_counts(redis_url: str, tmp_path: Path) -> None:
    plan = settings(tmp_path)
    with Store(redis_url, plan.run.name) as store:
        begin_run(store, plan.run)

    page = asyncio.run(look(plan, redis_url))

    values = page.values()
    assert set(values) == {metric.name for metric in METRICS}
    assert values["nyala_buffer_created_tasks_total"] == 0
    assert values["nyala_buffer_dropped_tasks_total"] == {"stale": 0}
    assert values["nyala_buffer_admitted_units"] == 4  # (lag 1 + 1) x 2 groups
    assert page.health.not_ready() is None
    assert values["nyala_actors_wanted"] == 1, "fleet.min_actors, before any batch"


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (b'{"batches": [{"actors_wanted": 9}, {"actors_wanted": 7, "step": 2}]}', 7),
        (b'{"batches": [{"step": 2}]}', 1),
        (b'{"batches": []}', 1),
        (b"no run snapshot", 1),
    ],
)
def test_the_page_has_the_number_of_actors_that_the_learner_wants(
    shown: bytes, wanted: int, redis_url: str, tmp_path: Path
) -> None:
    plan = settings(tmp_path)
    with Store(redis_url, plan.run.name) as store:
        begin_run(store, plan.run)
        lineage = store.run(operations.begin_lineage(0, 0))
        assert lineage is not None
        store.run(operations.write_run_snapshot(lineage, shown))

    page = asyncio.run(look(plan, redis_url))

    assert page.values()["nyala_actors_wanted"] == wanted


def test_a_broker_without_its_store_is_alive_and_not_ready(tmp_path: Path) -> None:
    page = asyncio.run(look(settings(tmp_path), NOBODY))

    assert (page.health.not_ready() or "").startswith("waits for its store: ")
    assert page.health.not_alive() is None
