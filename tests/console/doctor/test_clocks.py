"""Clocks that are wrong: this machine's against a real Redis, an actor's by its episodes."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from buffer import operations
from buffer.client.server_state import read_server_state
from buffer.operations.values import SubmitLine
from buffer.record.codec import encode_episode
from buffer.record.episode import FenceRun
from buffer.store import Store
from configs.errors import SettingsError
from console.doctor import live_run
from console.doctor.live_run import check_actor_clocks, check_machine_clock, clock_bounds
from tests.buffer.support.episodes import example_episode
from tests.buffer.support.run_in_store import GROUP_SIZE, RunInStore

NOW = 1_800_000_000.0


def made(*, ahead_s=0.0, leased_s=60.0, took_s=10.0, actor="a", others=()):
    """An episode that an actor whose clock is ahead began a second after its lease."""
    leased = NOW - leased_s
    fences = (*others, FenceRun(int(leased * 1e6), actor, len(others)))
    began = leased + 1.0 + ahead_s
    episode = example_episode()
    completion = replace(episode.completion, fences=fences)
    return replace(
        episode,
        completion=completion,
        incarnation=actor,
        started_at=began,
        finished_at=began + took_s,
    )


def test_right_clocks_are_bounded_by_waits_alone():
    ((low, high),) = clock_bounds([made(), made(leased_s=30)], NOW).values()

    assert low == pytest.approx(-19)  # finished 19 s ago
    assert high == pytest.approx(1)


def test_a_clock_that_is_ahead_or_behind_shows_in_its_own_bound():
    found = clock_bounds([made(ahead_s=100, actor="fast"), made(ahead_s=-100, actor="slow")], NOW)

    assert found["fast"][0] == pytest.approx(51)
    assert found["slow"][1] == pytest.approx(-99)


def test_an_episode_that_another_actor_began_bounds_one_side_alone():
    other = FenceRun(int((NOW - 600) * 1e6), "dead", 0)

    ((low, high),) = clock_bounds([made(others=[other])], NOW).values()

    assert (low, high) == (pytest.approx(-49), math.inf)


def test_this_machines_clock_is_compared_with_redis(redis_url, monkeypatch):
    assert "of this machine's" in check_machine_clock(redis_url)
    real = time.time
    read = read_server_state
    monkeypatch.setattr(
        live_run, "read_server_state", lambda url: read(url, clock=lambda: real() - 120)
    )

    with pytest.raises(SettingsError, match=r"within 2 s of this machine's, got \+1.*by NTP"):
        check_machine_clock(redis_url)


@pytest.mark.parametrize(("ahead_s", "says"), [(0, None), (50, "ahead by"), (-50, "behind by")])
def test_an_actor_is_judged_by_the_episodes_that_wait(redis_url, ahead_s, says):
    with Store(redis_url, "run") as store, RunInStore(store, redis_url) as run:
        run.create(1)
        lines = []
        for task in run.lease(GROUP_SIZE, incarnation="spot-7"):
            began = task.fence / 1e6 + ahead_s
            episode = example_episode()
            fence = FenceRun(task.fence, "spot-7", 0)
            episode = replace(
                episode,
                task_id=task.task_id,
                completion=replace(episode.completion, fences=(fence,)),
                incarnation="spot-7",
                started_at=began,
                finished_at=began,
            )
            lines.append(SubmitLine(task.task_id, task.fence, encode_episode(episode)))
        assert set(store.run(operations.submit(lines))) == {"OK"}

        if says is None:
            assert "spot-7" in check_actor_clocks(store, redis_url)
        else:
            with pytest.raises(SettingsError, match=rf"spot-7 is {says} at least (4\d|50)\.\d s;"):
                check_actor_clocks(store, redis_url)


def test_without_episodes_nothing_is_claimed(redis_url):
    with Store(redis_url, "run") as store, RunInStore(store, redis_url):
        assert check_actor_clocks(store, redis_url).startswith("not known")
