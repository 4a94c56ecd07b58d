"""The fleet that a run wants, and what it costs: from the store's actors to the run's files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from buffer.operations.values import ActorSeen
from configs.errors import BudgetSpent, exit_code
from learner.model.ranks import Ranks
from learner.reporting.advice import advisor_thread
from learner.reporting.advice.advisor_thread import FleetWatch
from tests.learner.support.ring_in_process import RingInProcess
from tests.learner.support.tiny_run import tiny_settings


def seen(name: str, *, silent_s: float = 0.0, **fields: str) -> ActorSeen:
    return ActorSeen(name, silent_s, {"version": "1.3", **fields})


def test_actors_with_weights_count_and_silent_ones_do_not(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, fleet={"min_actors": 2}, run={"group_size": 8})
    watch = FleetWatch(settings)
    loads = ActorSeen("new", 0.0, {"host": "h"})
    assert watch.wanted.actors == 2

    for k in range(3):
        busy_s = str(100.0 * k)
        gone = seen("gone", silent_s=60.0, busy_s=busy_s)
        actors = [seen("a", busy_s=busy_s), seen("b", busy_s=busy_s, tokens="?"), gone, loads]
        watch.observe_actors(100.0 * k, actors)
        watch.batch(100.0 * k, wait_s=50.0, span_s=100.0)

    assert watch.present == 3
    assert watch.wanted.actors == 4  # 2 / 0.5
    assert watch.wanted.reason == "learner idle 50%, actors busy 100%"


def test_figures_that_are_no_numbers_are_none(tmp_path: Path) -> None:
    watch = FleetWatch(tiny_settings(tmp_path))

    watch.observe_actors(0.0, [seen("a", busy_s="lots", weight_pause_s="")])
    watch.observe_actors(9.0, [seen("a", busy_s="more")])
    watch.batch(9.0, wait_s=0.0, span_s=9.0)

    assert watch.wanted.actors == 1


@pytest.fixture
def two_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two actors be seen from the first batch on: the ring's own thread says no HELLO."""
    look, batch, has_begun = FleetWatch.observe_actors, FleetWatch.batch, threading.Event()

    def with_two(watch: FleetWatch, now_s: float, actors: Iterable[ActorSeen]) -> None:
        look(watch, now_s, [*actors, seen("a"), seen("b")] if has_begun.is_set() else actors)

    def begun(watch: FleetWatch, now_s: float, *, wait_s: float, span_s: float) -> None:
        has_begun.set()
        batch(watch, now_s, wait_s=wait_s, span_s=span_s)

    monkeypatch.setattr(FleetWatch, "observe_actors", with_two)
    monkeypatch.setattr(FleetWatch, "batch", begun)
    monkeypatch.setattr(advisor_thread, "ASK_EVERY_S", 0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("two_actors")
def test_a_spent_budget_ends_the_learner_after_a_checkpoint_and_a_larger_one_goes_on(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    run = {"steps": 12, "eval_every": 0, "eval_episodes": 4}
    price = {"price_per_actor_hour": 3600.0}  # 1 for each second
    poor = tiny_settings(tmp_path, run=run, fleet=price | {"max_total": 0.01})

    with pytest.raises(BudgetSpent, match=r"fleet\.max_total must be above .*, got 0\.01") as spent:
        RingInProcess(poor, redis_url, ranks).live()

    assert exit_code(spent.value) == 2
    folder = poor.run.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 0 < len(lines) < 12
    assert [path.name for path in (folder / "checkpoints").glob("step-*")][-1:]
    assert not (folder / "summary.json").exists()

    rich = tiny_settings(tmp_path, run=run, fleet=price | {"max_total": 1e6})
    assert RingInProcess(rich, redis_url, ranks).live()

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    costs = [line["cost"] for line in lines]
    assert costs == sorted(costs)
    assert lines[-1]["actors"] == 2
    assert summary["cost"] >= costs[-1] > 0.01
    assert summary["cost"] == pytest.approx(summary["actor_hours"] * 3600, abs=0.5)
    per_million = summary["cost"] / summary["trained_tokens"] * 1e6
    assert summary["cost_per_million_trained_tokens"] == pytest.approx(per_million, rel=1e-3)
    assert "cost_per_point_of_accuracy" in summary
