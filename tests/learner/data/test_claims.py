"""Batches are looked at, waited for, and handed over once they are full."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from buffer.operations.keys import run_prefix
from buffer.operations.operation import Operation
from buffer.operations.values import Claim
from configs.errors import DeadlineError, LostLineage, StoreError
from learner.data.claims import DEADLINE_S, Claims
from tests.learner.support.claims_bench import Bench, groups_of
from tests.learner.support.tiny_run import tiny_settings


def test_a_batch_is_handed_over_once_it_is_full_and_sealed(bench: Bench) -> None:
    claims = bench.claims()
    bench.fill(1)
    assert claims.poll(1) is None

    bench.fill(1, first=1)
    batch = claims.poll(1)

    assert batch is not None
    assert [episode.task_id for episode in batch.episodes] == list(range(8))
    assert not batch.is_replay
    assert bench.stats().claims[0].sealed


@dataclass(slots=True)
class Wire:
    """Between a learner and its store: hears what claims list, and fails where it is told to."""

    run: Callable[[Operation[object]], object]
    listed: list[list[int]] = field(default_factory=list)
    fails: str | None = None
    """The next operation of this name fails."""
    is_done: bool = False
    """The one that fails is done nevertheless."""

    def __call__(self, operation: Operation[object]) -> object:
        """Carry an operation out, or not."""
        fails, self.fails = self.fails, None if operation.name == self.fails else self.fails
        if operation.name != fails:
            return self._heard(self.run(operation))
        if self.is_done:
            self.run(operation)
        raise StoreError("the line is dead")

    def _heard(self, answer: object) -> object:
        if isinstance(answer, Claim):
            self.listed.append([unit.group_id for unit in answer.units])
        return answer


@pytest.fixture
def wire(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire(bench.store.run)
    monkeypatch.setattr(bench.store, "run", wire)
    return wire


def test_a_look_lists_what_has_come_and_a_full_batch_whole(bench: Bench, wire: Wire) -> None:
    claims = bench.claims()
    bench.fill(1)
    for _ in range(3):
        assert claims.poll(1) is None
    assert wire.listed == [[0], [], []]

    bench.fill(1, first=1)
    assert claims.poll(1) is not None
    assert claims.poll(2) is None
    assert wire.listed[3:] == [[0, 1], []]


def test_a_new_life_and_a_recovered_store_list_the_batch_again(bench: Bench, wire: Wire) -> None:
    bench.fill(1)
    bench.claims().poll(1)

    claims = bench.restart(0)
    claims.poll(1)
    claims.poll(1)
    bench.patient.recoveries += 1
    claims.poll(1)

    assert wire.listed == [[0], [0], [], [0]]


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("fails", ["claim", "records", "drop"])
def test_a_look_after_one_that_failed_judges_what_had_come(
    bench: Bench, wire: Wire, tmp_path: Path, fails: str, is_done: bool
) -> None:
    bench.settings = tiny_settings(tmp_path, run={"groups_per_batch": 3})
    claims = bench.claims()
    bench.fill(1)
    claims.poll(1)
    bench.fill(1, first=1)
    bench.spoil(5)
    wire.fails, wire.is_done = fails, is_done

    with pytest.raises(StoreError, match="the line is dead"):
        claims.poll(1)
    assert claims.poll(1) is None

    assert bench.stats().dropped == {"unreadable": 4}
    bench.fill(1, first=2)
    assert claims.poll(1) is None
    assert wire.listed[-1] == [2]
    bench.fill(1, first=3)
    batch = claims.poll(1)
    assert batch is not None
    assert groups_of(batch.episodes) == [0, 2, 3]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_full_batch_whose_seal_failed_is_handed_over_by_the_next_look(
    bench: Bench, wire: Wire, is_done: bool
) -> None:
    bench.fill(2)
    claims = bench.claims()
    wire.fails, wire.is_done = "seal", is_done

    with pytest.raises(StoreError, match="the line is dead"):
        claims.poll(1)
    batch = claims.poll(1)

    assert batch is not None
    assert groups_of(batch.episodes) == [0, 1]
    assert batch.is_replay == is_done


def test_a_batch_that_was_given_up_is_known_anew(bench: Bench, wire: Wire) -> None:
    bench.fill(2)
    claims = bench.claims()
    wire.fails, wire.is_done = "seal", True
    with pytest.raises(StoreError, match="the line is dead"):
        claims.poll(1)
    with redis.Redis.from_url(bench.url) as client:
        client.delete(f"{run_prefix('tiny')}:e:1")
    assert claims.poll(1) is None
    assert claims.dropped.units == {"forgotten": 2}

    bench.fill(1, first=2)
    for _ in range(2):
        assert claims.poll(1) is None

    assert wire.listed[-2:] == [[2], []]


def test_an_older_learner_is_refused(bench: Bench) -> None:
    old = bench.claims()
    bench.restart(0)

    with pytest.raises(LostLineage):
        old.poll(1)


def test_waiting_ends_when_there_is_something_better_to_do(bench: Bench) -> None:
    assert bench.claims().wait(1, until=lambda: True) is None


def _look_in_slices(claims: Claims, step: int, *, slices: int) -> None:
    """Wait as the loop does: a short while, over and over."""
    for _ in range(slices):
        answers = [True, False]
        assert claims.wait(step, until=answers.pop) is None


def test_a_day_without_a_batch_is_counted_over_many_short_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.data.claims.DEADLINE_S", 0.1)

    with pytest.raises(DeadlineError, match="batch 1 must fill within"):
        _look_in_slices(bench.claims(), 1, slices=50)


def test_the_wait_for_each_batch_counts_by_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = bench.claims()
    _look_in_slices(claims, 1, slices=1)
    bench.fill(2)
    assert claims.wait(1, until=lambda: False) is not None
    a_day_later = SimpleNamespace(
        monotonic=lambda: time.monotonic() + DEADLINE_S, sleep=lambda _: None
    )
    monkeypatch.setattr("learner.data.claims.time", a_day_later)

    _look_in_slices(claims, 2, slices=1)


def test_a_long_wait_is_reported_however_it_is_cut(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("learner.data.claims.REPORT_EVERY_S", 0.05)

    _look_in_slices(bench.claims(), 1, slices=6)

    assert "waiting for episodes" in capsys.readouterr().out


def test_a_short_wait_is_not_reported(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    _look_in_slices(bench.claims(), 1, slices=3)

    assert "waiting for episodes" not in capsys.readouterr().out
