"""Groups whose rewards are all equal teach nothing, and make way where they are filtered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.record.episode import Episode
from configs.settings import AlgorithmSettings, BufferSettings, RewardSettings, RunSettings
from learner.algorithm.methods import overrides_of
from learner.data.group_filter import GroupFilter
from learner.data.records import shape_reward
from tests.learner.support.claims_bench import Bench, groups_of
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import answer_leases, new_ledger, tiny_settings


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
    assert batch.filtered == {(0, 0): [1.0] * 4, (1, 1): [1.0] * 4, (3, 3): [0.0] * 4}
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


@pytest.mark.parametrize("metric", [None, "accuracy", "exact"])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_a_group_is_not_kept_for_its_lengths_alone(metric: str | None, right: float) -> None:
    """DAPO's equation 11 counts right answers, whatever its punishment of length took off."""
    rewards = RewardSettings(overlong_buffer_tokens=7, overlong_penalty=0.3)
    group = [
        shape_reward(
            make_episode(task_id, completion=[8] * length, reward=right),
            rewards,
            max_completion_tokens=8,
        )
        for task_id, length in enumerate((1, 3, 5, 8))
    ]
    algorithm = AlgorithmSettings(filter_zero_variance=True, filter_metric=metric)
    groups = _filter(algorithm, rewards)

    assert len({episode.reward for episode in group}) == 4
    assert groups.reason_to_drop(1, group) == "zero_variance"
    other = replace(group[0], reward=1 - right, reward_parts={"exact": 1 - right})
    assert groups.reason_to_drop(1, [*group[1:], other]) is None


@pytest.mark.parametrize(
    ("parts", "weights", "kept"),
    [
        ({}, {}, False),  # the environment's own score, which is dense and has `exact`
        ({"environment": 0.0, "mine": 0.0}, {}, True),  # a function's reward: it is correctness
        ({}, {"shape": 1.0}, True),  # `exact` is not trained
    ],
)
def test_dapo_compares_correctness_where_it_is_trained(
    parts: dict[str, float], weights: dict[str, float], kept: bool
) -> None:
    chosen = dict(each.split("=", 1) for each in overrides_of("DAPO"))
    algorithm = AlgorithmSettings(
        filter_zero_variance=True, filter_metric=json.loads(chosen["algorithm.filter_metric"])
    )
    group = [
        replace(make_episode(n, reward=reward), reward_parts={"exact": 0.0} | parts)
        for n, reward in enumerate((0.25, 0.5))
    ]

    reason = _filter(algorithm, RewardSettings(weights=weights)).reason_to_drop(1, group)

    assert reason == (None if kept else "zero_variance")


def _filter(algorithm: AlgorithmSettings, rewards: RewardSettings) -> GroupFilter:
    run = RunSettings(model="-", max_prompt_tokens=8, max_completion_tokens=8, group_size=4)
    return GroupFilter(
        run,
        BufferSettings(),
        algorithm,
        ledger=new_ledger(1),
        vocabulary=64,
        rewards=rewards,
    )


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
