"""What `nyala up` knows of the run's actors, and does when one of its own dies."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer import operations
from buffer.store import Store
from configs.settings import Settings
from console.run.actor_watch import Crew
from learner.data.curriculum import training_tasks
from tests.console.support.waiting import wait_until
from tests.learner.support.tiny_run import begin_run, tiny_settings

HERE = socket.gethostname()
DEAD, OTHER = os.getpid(), os.getpid() + 1


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return tiny_settings(tmp_path)


@pytest.fixture
def store(redis_url: str, settings: Settings) -> Iterator[Store]:
    with Store(redis_url, settings.run.name) as opened:
        begin_run(opened, settings.run)
        lineage = opened.run(operations.begin_lineage(0, 0))
        assert lineage is not None
        opened.run(operations.create(lineage, training_tasks(settings.run, range(3), {})))
        yield opened


def actor(store: Store, name: str, *, host: str, pid: int) -> None:
    """Let an actor be heard of, and hold a group's leases."""
    store.run(operations.actor_seen({name: {"host": host, "pid": str(pid)}}))
    lease = store.run(operations.lease(name, ttl_ms=60_000, n=4, version=(1, 0)))
    assert len(lease.tasks) == 4


def holders(store: Store) -> set[str]:
    return {task.incarnation for task in store.run(operations.look()).values()}


def test_leases_of_an_actor_whose_process_ended_here_are_taken_back_at_once(
    store: Store, redis_url: str, settings: Settings
) -> None:
    actor(store, "dead", host=HERE, pid=DEAD)
    actor(store, "beside it", host=HERE, pid=OTHER)
    actor(store, "elsewhere", host="far.away", pid=DEAD)
    crew = Crew(settings, redis_url)
    crew.start()
    try:
        crew.mourn(DEAD)
        wait_until(lambda: "dead" not in holders(store))

        assert holders(store) == {"beside it", "elsewhere"}
        wait_until(lambda: crew.alive == 3)  # all have just been heard of
    finally:
        crew.close()
