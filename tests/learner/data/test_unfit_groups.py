"""Groups that may not be trained, stale, unreadable or made by nobody of this run, give way."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from buffer import operations
from buffer.operations.keys import run_prefix
from tests.configs.support.recording import recording
from tests.learner.support.claims_bench import VOCABULARY, Bench, groups_of
from tests.learner.support.tiny_run import tiny_settings


def test_a_stale_group_is_dropped_and_its_place_filled(bench: Bench) -> None:
    bench.fill(2)
    bench.store.run(
        operations.advance(bench.lineage, 2)
    )  # batch 3 allows lag 1: version 1 or newer
    claims = bench.claims()

    with recording() as recorded:
        assert claims.poll(3) is None
        assert [span.attributes["task"] for span in recorded.named("drop")] == list(range(8))
    assert bench.stats().dropped == {"stale": 8}
    assert claims.dropped.units == {"stale": 2}
    assert claims.dropped.tokens == 16

    bench.fill(2, first=2, version=(bench.lineage, 1))
    batch = claims.poll(3)
    assert batch is not None
    assert groups_of(batch.episodes) == [2, 3]


def test_drops_are_counted_by_length_and_their_prompts_asked_again(
    bench: Bench, tmp_path: Path
) -> None:
    bench.settings = tiny_settings(tmp_path, run={"max_completion_tokens": 200})
    bench.fill(2, completion=[8] * 200)
    bench.store.run(operations.advance(bench.lineage, 2))
    claims, ledger = bench.claims(), bench.ledger

    assert claims.poll(3) is None

    assert claims.dropped.episodes_by_length == {"<=512": 8}
    assert list(ledger.facts.waiting) == [0, 1]

    bench.settings = tiny_settings(tmp_path, buffer={"recreate_dropped": False})
    bench.fill(2, first=2, version=(bench.lineage, 2), answered_by=(bench.lineage, 0))
    claims = bench.claims()
    assert claims.poll(3) is None
    assert claims.dropped.units == {"stale": 2}
    assert not bench.ledger.facts.waiting


def test_stale_groups_are_trained_where_the_settings_say_so(bench: Bench, tmp_path: Path) -> None:
    bench.settings = tiny_settings(tmp_path, buffer={"on_stale": "train"})
    bench.fill(2)

    assert bench.claims().poll(3) is not None


def test_an_unreadable_record_drops_its_group(bench: Bench) -> None:
    bench.fill(3)
    bench.spoil(1)
    claims = bench.claims()

    assert claims.poll(1) is None  # drops group 0
    batch = claims.poll(1)

    assert batch is not None
    assert groups_of(batch.episodes) == [1, 2]
    assert bench.stats().dropped == {"unreadable": 4}


def test_a_record_under_a_wrong_id_is_unreadable(bench: Bench) -> None:
    bench.fill(2)
    with redis.Redis.from_url(bench.url) as client:
        other = client.get(f"{run_prefix('tiny')}:e:6")
        assert isinstance(other, bytes)
        client.set(f"{run_prefix('tiny')}:e:1", other)

    bench.claims().poll(1)

    assert bench.stats().dropped == {"unreadable": 4}


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [([5, VOCABULARY], [5]), ([5], [5, VOCABULARY]), ([5], [5] * 9), ([5] * 9, [5])],
)
def test_what_no_actor_of_this_run_can_have_made_drops_its_group(
    bench: Bench, prompt: list[int], completion: list[int]
) -> None:
    bench.fill(1, prompt=prompt, completion=completion)
    bench.fill(1, first=1, completion=[5, VOCABULARY - 1])
    claims = bench.claims()

    assert claims.poll(1) is None

    assert claims.dropped.units == {"impossible": 1}
    assert bench.stats().dropped == {"impossible": 4}


@pytest.mark.parametrize("newer", [(1, 1), (2, 0)])
def test_tokens_of_a_version_that_is_not_there_yet_drop_their_group(
    bench: Bench, newer: tuple[int, int]
) -> None:
    bench.fill(1)
    bench.fill(1, first=1, answered_by=newer)
    claims = bench.claims()

    assert claims.poll(1) is None

    assert claims.dropped.units == {"impossible": 1}
