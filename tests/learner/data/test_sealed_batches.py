"""A sealed batch is replayed after a crash, until it kills too many lives or is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.operations.operation import Operation
from configs.errors import RecordError
from learner.data.batch import plan_batch
from tests.learner.support.claims_bench import Bench, groups_of


def test_a_sealed_batch_replays_whatever_filter_is_set(bench: Bench, tmp_path: Path) -> None:
    bench.fill(2, reward=lambda _: 1.0)
    first = bench.claims().poll(1)
    assert first is not None
    bench.filter(tmp_path)

    replay = bench.restart(0).poll(1)

    assert replay is not None
    assert replay.is_replay
    assert replay.filtered_groups == 0
    plans = [
        plan_batch(
            1,
            batch.episodes,
            ranks=1,
            settings=bench.settings.algorithm,
            max_completion_tokens=8,
            microbatch_tokens=16384,
        )
        for batch in (first, replay)
    ]
    assert plans[0].encode() == plans[1].encode()


def test_a_sealed_batch_replays_unchanged_and_is_not_judged_again(bench: Bench) -> None:
    bench.fill(3)
    first = bench.claims().poll(1)
    assert first is not None
    bench.settings = bench.settings.model_copy(
        update={"run": bench.settings.run.model_copy(update={"max_policy_lag": 0})}
    )

    replay = bench.restart(0).poll(1)

    assert replay is not None
    assert replay.is_replay
    assert [e.task_id for e in replay.episodes] == [e.task_id for e in first.episodes]
    assert bench.stats().claims[0].starts == 2


def test_a_batch_that_was_filling_at_a_crash_is_judged_anew(bench: Bench) -> None:
    bench.fill(1)
    assert bench.claims().poll(1) is None

    claims = bench.restart(0)
    bench.fill(1, first=1)
    batch = claims.poll(1)

    assert batch is not None
    assert not batch.is_replay
    assert groups_of(batch.episodes) == [0, 1]


def test_a_batch_that_keeps_killing_the_learner_is_given_up(bench: Bench) -> None:
    bench.fill(4)
    assert bench.claims().poll(1) is not None
    for _ in range(2):
        replay = bench.restart(0).poll(1)
        assert replay is not None
        assert replay.is_replay

    claims = bench.restart(0)
    batch = claims.poll(1)  # the fourth start

    assert batch is not None
    assert not batch.is_replay
    assert groups_of(batch.episodes) == [2, 3]
    assert claims.dropped.units == {"poison": 2}
    stats = bench.stats()
    assert stats.dead == 8
    letter = bench.store.run(operations.dead_letter(0))
    assert letter is not None
    assert letter.letter.why == "poison"
    assert letter.record is not None
    assert stats.accounted == stats.created


def test_lives_that_train_a_batch_do_not_count_against_it(bench: Bench) -> None:
    bench.fill(2)
    first = bench.claims().poll(1)
    assert first is not None
    bench.store.run(operations.advance(bench.lineage, 1))

    for _ in range(4):  # each dies after the batch and before a checkpoint
        claims = bench.restart(0)
        replay = claims.poll(1)
        assert replay is not None
        assert replay.is_replay
        assert groups_of(replay.episodes) == groups_of(first.episodes)
        bench.store.run(operations.advance(bench.lineage, 1))

    assert bench.stats().dropped == {}
    assert bench.stats().claims[0].starts == 0


def test_an_unreadable_record_in_a_sealed_batch_ends_the_life(bench: Bench) -> None:
    bench.fill(2)
    assert bench.claims().poll(1) is not None
    with redis.Redis.from_url(bench.url) as client:
        client.set(f"{run_prefix('tiny')}:e:1", b"changed")

    with pytest.raises(RecordError, match="sealed batch 1 must be readable"):
        bench.restart(0).poll(1)


@pytest.mark.parametrize("left", [b"changed", None])
def test_a_sealed_batch_that_is_read_across_a_rewind_is_claimed_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, left: bytes | None
) -> None:
    bench.fill(2)
    assert bench.claims().poll(1) is not None
    claims, run, key = bench.restart(0), bench.store.run, f"{run_prefix('tiny')}:e:1"
    with redis.Redis.from_url(bench.url) as client:
        record = client.get(key)
        assert isinstance(record, bytes)

        def rewound(operation: Operation[object]) -> object:
            if operation.name == "records":
                bench.patient.recoveries = 1
                client.delete(key) if left is None else client.set(key, left)
            return run(operation)

        monkeypatch.setattr(bench.store, "run", rewound)
        assert claims.poll(1) is None
        monkeypatch.setattr(bench.store, "run", run)
        client.set(key, record)

    batch = claims.poll(1)
    assert batch is not None
    assert batch.is_replay
    assert claims.dropped.units == {}


def test_a_sealed_batch_whose_records_the_store_forgot_is_claimed_anew(bench: Bench) -> None:
    bench.fill(4)
    assert bench.claims().poll(1) is not None
    with redis.Redis.from_url(bench.url) as client:
        client.delete(f"{run_prefix('tiny')}:e:1")

    claims = bench.claims()

    assert claims.poll(1) is None
    again = claims.poll(1)
    assert again is not None
    assert {episode.group_id for episode in again.episodes} == {2, 3}
    assert claims.dropped.units == {"forgotten": 2}
