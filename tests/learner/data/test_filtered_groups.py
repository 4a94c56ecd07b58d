"""Groups whose rewards are all equal teach nothing, and make way where they are filtered."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.record.episode import Episode
from tests.learner.support.claims_bench import Bench, groups_of
from tests.learner.support.tiny_run import answer_leases, tiny_settings


def _no_answer(task_id: int, _spec: TaskSpec) -> Episode:
    raise AssertionError(f"task {task_id} should not have been leased")


def test_groups_of_equal_rewards_make_way_for_others(bench: Bench, tmp_path: Path) -> None:
    bench.filter(tmp_path)
    bench.fill(2, reward=lambda _: 1.0)
    claims = bench.claims()

    assert claims.poll(1) is None
    bench.fill(1, first=2)
    bench.fill(1, first=3, reward=lambda _: 0.0)
    assert claims.poll(1) is None
    bench.fill(1, first=4)
    batch = claims.poll(1)

    assert batch is not None
    assert groups_of(batch.episodes) == [2, 4]
    assert batch.filtered_groups == 3
    assert claims.dropped.units == {"zero_variance": 3}
    assert claims.dropped.tokens == 24
    stats = bench.stats()
    assert stats.dropped == {"zero_variance": 12}
    assert stats.accounted == stats.created == 20


def test_filtered_groups_give_their_room_back(bench: Bench, tmp_path: Path) -> None:
    bench.filter(tmp_path)
    bench.fill(4, reward=lambda _: 1.0)  # all that admission allows: (lag 1 + 1) x 2 groups
    assert answer_leases(bench.store, (bench.lineage, 0), _no_answer) == 0
    claims = bench.claims()

    assert claims.poll(1) is None
    assert claims.poll(1) is None

    bench.fill(4, first=4)
    batch = claims.poll(1)
    assert batch is not None
    assert groups_of(batch.episodes) == [4, 5]


def test_equal_rewards_are_judged_after_shaping(bench: Bench, tmp_path: Path) -> None:
    shaping = {"weights": {"exact": 0.0, "other": 1.0}}
    bench.settings = tiny_settings(
        tmp_path, algorithm={"filter_zero_variance": True}, rewards=shaping
    )
    bench.fill(2)  # rewards differ, but only in a part that does not count
    claims = bench.claims()

    assert claims.poll(1) is None
    assert claims.dropped.units == {"zero_variance": 2}


def test_a_metric_by_its_name_may_be_compared_instead(bench: Bench, tmp_path: Path) -> None:
    bench.filter(tmp_path, filter_metric="exact")
    bench.fill(2, reward=lambda task_id: 0.5 + 0.1 * (task_id % 2))  # none is right
    bench.fill(2, first=2, reward=lambda task_id: 0.5 + 0.5 * (task_id % 2))
    claims = bench.claims()

    assert claims.poll(1) is None
    batch = claims.poll(1)

    assert batch is not None
    assert groups_of(batch.episodes) == [2, 3]
    assert claims.dropped.units == {"zero_variance": 2}


def test_a_metric_that_there_is_not_is_an_error_and_the_reward_is_compared(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.filter(tmp_path, filter_metric="acc")
    bench.fill(2)

    assert bench.claims().poll(1) is not None
    assert "algorithm.filter_metric must be a part of the reward" in capsys.readouterr().out


def test_after_so_many_groups_those_of_equal_rewards_are_trained(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.filter(tmp_path, max_gen_batches=2)
    claims = bench.claims()
    bench.fill(4, reward=lambda _: 1.0)  # two batches' worth

    assert claims.poll(1) is None  # drops the first two
    batch = claims.poll(1)

    assert batch is not None
    assert groups_of(batch.episodes) == [2, 3]
    assert batch.filtered_groups == 2
    assert "a group of equal rewards is trained" in capsys.readouterr().out

    bench.store.run(operations.advance(bench.lineage, 1))
    bench.fill(2, first=4, version=(bench.lineage, 1), reward=lambda _: 1.0)
    assert claims.poll(2) is None  # each batch has its own budget
    assert claims.dropped.units == {"zero_variance": 4}


def test_a_weight_of_a_part_that_no_episode_has_is_an_alarm_and_not_the_end(
    bench: Bench, tmp_path: Path
) -> None:
    bench.settings = tiny_settings(tmp_path, rewards={"weights": {"exakt": 1.0, "exact": 1.0}})
    bench.fill(2)

    batch = bench.claims().poll(1)

    assert batch is not None
    assert batch.missing_parts == ("exakt",)
