"""`benchmarks.scale`: engines share their speed, what was taken away is resumed, lag is bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale.engines import Engine, Episode
from benchmarks.scale.fleet import Fleet
from benchmarks.scale.report import ratios
from benchmarks.scale.workload import Workload, arrival_s
from buffer import operations

LITTLE = Workload(
    groups_per_batch=4,
    learner_tokens_per_s=10_000.0,
    median_tokens=100.0,
    max_tokens=1000,
    capacity=8,
    life_s=0.0,
)


def fleet(workload: Workload, *, actors: int = 4, lag: int = 2) -> Fleet:
    return Fleet(workload, actors=actors, max_policy_lag=lag, transport="broadcast", seed=1)


def test_sequences_of_one_engine_slow_each_other_down():
    engine = Engine(replace(LITTLE, step_s=1.0, step_s_a_sequence=1.0), "actor-0")
    engine.start(Episode(1, 1, tokens=10, oldest=0))  # alone: 0.5 tokens a second
    engine.advance(4.0)
    engine.start(Episode(2, 1, tokens=4, oldest=0))  # from here a third

    assert engine.next_end() == pytest.approx(4.0 + 4 * 3)

    engine.advance(16.0)
    assert [episode.task_id for episode in engine.finished()] == [2]
    assert engine.next_end() == pytest.approx(16.0 + 4 * 2)


def test_an_engine_that_is_stopped_leaves_the_tokens_that_it_had_handed_over():
    engine = Engine(replace(LITTLE, step_s=1.0, step_s_a_sequence=0.0), "actor-0")
    engine.start(Episode(1, 1, tokens=100, oldest=0, done=20))
    engine.advance(30.0)

    [left] = engine.stop(unsaved_tokens=3.0)

    assert left.done == 20 + 30 - 3
    assert not engine.is_alive


def test_episodes_of_machines_that_are_taken_away_are_resumed_and_none_is_lost():
    simulated = fleet(replace(LITTLE, life_s=30.0, start_s=5.0), lag=8)

    figures = simulated.run(warm_up=0, steps=30, most_s=10_000.0)

    assert figures["steps"] == 30
    assert figures["resumed"] > 0
    stats = simulated.store.run(operations.stats())
    assert stats.committed == 30 * LITTLE.batch
    assert stats.dead == 0
    places = stats.ready, stats.leased, stats.buffered, stats.claimed, stats.committed
    assert stats.created == sum(places) + sum(stats.dropped.values())


@pytest.mark.parametrize("lag", [1, 4])
def test_nothing_older_than_the_policy_lag_is_trained(lag: int):
    simulated = fleet(LITTLE, lag=lag)

    figures = simulated.run(warm_up=0, steps=30, most_s=10_000.0)

    assert figures["steps"] == 30
    assert max(simulated.tally.lags) == lag


def test_the_open_groups_are_bounded_however_many_actors_ask():
    few, many = (fleet(LITTLE, actors=n).run(warm_up=2, steps=10, most_s=1e4) for n in (16, 64))

    assert many["places_used"] < few["places_used"] / 2
    assert many["actor_idle"] > few["actor_idle"]


def test_weights_pulled_one_by_one_take_longer_the_more_actors_there_are():
    whole = arrival_s(LITTLE, "broadcast", 1)

    assert arrival_s(LITTLE, "broadcast", 1000) == whole
    assert arrival_s(LITTLE, "pull", 1000) == pytest.approx(1000 * whole)
    assert whole < arrival_s(LITTLE, "sparse", 1000) < arrival_s(LITTLE, "pull", 1000)


def test_a_ratio_compares_a_fleet_with_the_next_smaller_one_alike():
    row = {"lag": 2, "batch": 1024, "transport": "broadcast"}
    arms = {
        "a": row | {"actors": 16, "trained_tokens_per_s": 10},
        "b": row | {"actors": 64, "trained_tokens_per_s": 15},
        "c": row | {"actors": 256, "trained_tokens_per_s": 30},
        "d": row | {"actors": 64, "lag": 1, "trained_tokens_per_s": 99},
    }

    assert ratios(arms) == {"b over 16": 1.5, "c over 64": 2.0}
