"""The count of live actors, and the release of a dead local actor's leases."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer import operations
from buffer.store import Store
from configs.errors import SettingsError
from configs.settings import Settings
from console.run.actor_watch import (
    LOOK_EVERY_S,
    MAX_PENDING,
    REPORT_WITHIN_S,
    RETRY_S,
    ActorWatch,
    PendingDeaths,
    idle_reason,
)
from learner.data.curriculum import training_tasks
from tests.learner.support.rewinding_redis import RewindingRedis
from tests.learner.support.tiny_run import begin_run, tiny_settings
from tests.waiting import wait_until

HERE = socket.gethostname()
DEAD, OTHER = os.getpid(), os.getpid() + 1


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return tiny_settings(tmp_path)


@pytest.fixture
def store(redis_url: str, settings: Settings) -> Iterator[Store]:
    with Store(redis_url, settings.run.name) as opened:
        begin_training(opened, settings)
        yield opened


def begin_training(store: Store, settings: Settings) -> None:
    begin_run(store, settings.run)
    lineage = store.run(operations.begin_lineage(0, 0))
    assert lineage is not None
    store.run(operations.create(lineage, training_tasks(settings.run, range(3), {})))


def actor(store: Store, name: str, *, host: str, pid: int) -> None:
    """Let an actor be heard of, and hold a group's leases."""
    key = f"key of {name}"
    store.run(operations.actor_seen({name: {"host": host, "pid": str(pid), "key": key}}))
    lease = store.run(operations.lease(name, ttl_ms=60_000, n=4, version=(1, 0), key=key))
    assert len(lease.tasks) == 4


def watch_of(settings: Settings, url: str) -> ActorWatch:
    return ActorWatch(url, settings)


def holders(store: Store) -> set[str]:
    return {task.incarnation for task in store.run(operations.inspect()).values()}


def test_leases_of_an_actor_whose_process_ended_here_are_taken_back_at_once(
    store: Store, redis_url: str, settings: Settings
) -> None:
    actor(store, "dead", host=HERE, pid=DEAD)
    actor(store, "beside it", host=HERE, pid=OTHER)
    actor(store, "elsewhere", host="far.away", pid=DEAD)
    watch = watch_of(settings, redis_url)
    watch.start()
    try:
        watch.report_death(DEAD)
        wait_until(lambda: "dead" not in holders(store))

        assert holders(store) == {"beside it", "elsewhere"}
        wait_until(lambda: watch.alive == 3)  # all have just been heard of
    finally:
        watch.close()


def test_a_death_while_redis_is_away_is_reported_once_it_is_back(
    tmp_path: Path, settings: Settings
) -> None:
    server = RewindingRedis(tmp_path / "redis")
    server.start()
    watch = watch_of(settings, server.url)
    try:
        with Store(server.url, settings.run.name) as store:
            begin_training(store, settings)
            actor(store, "dead", host=HERE, pid=DEAD)
            watch.start()
            wait_until(lambda: watch.alive == 1)

            server.kill()
            watch.report_death(DEAD)
            wait_until(lambda: watch.alive is None)
            server.start()

            wait_until(lambda: "dead" not in holders(store))
    finally:
        watch.close()
        server.kill()


def test_a_death_in_a_recovering_store_is_reported_once_it_runs_again(
    store: Store, redis_url: str, settings: Settings
) -> None:
    actor(store, "dead", host=HERE, pid=DEAD)
    assert store.run(operations.confirm("another life")) == "RECOVERING"
    watch = watch_of(settings, redis_url)
    watch.report_death(DEAD)
    watch.start()
    try:
        wait_until(lambda: watch.alive == 1)
        assert "dead" in holders(store)

        store.run(operations.recovered(1, "another life"))

        wait_until(lambda: "dead" not in holders(store))
    finally:
        watch.close()


def test_what_ends_the_thread_is_raised_by_check(settings: Settings) -> None:
    watch = watch_of(settings, "nonsense://127.0.0.1")
    watch.start()

    with pytest.raises(SettingsError, match="must begin with one of"):
        wait_until(watch.check_watch_thread)  # its answer is None until it raises

    assert watch.alive is None


def test_a_pending_death_is_given_up_after_a_while() -> None:
    now = 0.0
    deaths = PendingDeaths(clock=lambda: now)
    deaths.add(1)
    now = 1.0
    deaths.add(2)

    assert deaths.current() == [1, 2]
    now = REPORT_WITHIN_S
    assert deaths.current() == [2]
    deaths.remove(2)
    assert deaths.current() == []


def test_pending_deaths_are_bounded_and_the_newest_stay() -> None:
    deaths = PendingDeaths()
    for pid in range(1, MAX_PENDING + 3):
        deaths.add(pid)

    assert deaths.current() == list(range(3, MAX_PENDING + 3))


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_pending_death_shortens_the_pause_by_a_random_amount(share: float) -> None:
    deaths = PendingDeaths(jitter=lambda: share)
    assert deaths.pause_s == LOOK_EVERY_S

    deaths.add(1)

    assert deaths.pause_s == pytest.approx(RETRY_S * (1 + share / 2))


def test_a_reason_for_idleness_counts_only_while_the_learner_waits(
    store: Store, settings: Settings
) -> None:
    def reason() -> str | None:
        stats, memory = store.run(operations.stats()), store.run(operations.memory())
        seen, closed = store.run(operations.actors()), store.run(operations.closed())
        return idle_reason(settings, stats, seen, memory, closed)

    assert reason() is None
    store.run(operations.claim(1, 1, 2, start=True))
    assert "start one: nyala actor" in str(reason())
    actor(store, "at work", host="h", pid=1)
    assert reason() is None
