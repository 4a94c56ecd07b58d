"""A learner whose rewards are all the same, on a real store: its files have the advice."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import structlog

from buffer import operations
from buffer.operations.operation import Operation
from buffer.operations.values import Stats
from buffer.store import Store
from configs.errors import StoreError
from learner.data.policy_lag import FreshTokens
from learner.data.retrying_store import RetryingStore
from learner.model.ranks import Ranks
from learner.reporting.advice import advisor_thread
from learner.reporting.advice.advisor_thread import AdvisorThread
from learner.reporting.advice.evidence import Advice
from learner.reporting.advice.gathering import NO_VOCABULARY
from learner.reporting.metrics import batch_figures
from learner.training.divergence import Divergence
from tests.learner.support import ring_in_process
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.ring_in_process import RingInProcess
from tests.learner.support.tiny_run import begin_run, tiny_settings
from tests.waiting import wait_until

WHERE = "reward raised KeyError: 'answer', at /a/grading.py:3"


@pytest.mark.slow
def test_a_constant_reward_is_in_metrics_and_summary(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ring_in_process, "make_episode", lambda *a, **k: make_episode(*a, **k | {"reward": 0.0})
    )
    settings = tiny_settings(tmp_path, run={"steps": 16})

    assert RingInProcess(settings, redis_url, ranks).live()

    folder = settings.run.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held = json.loads((folder / "summary.json").read_text())["advice"]
    advice = held[0]  # a busy machine may add that the learner waits
    assert advice["rule"] == "reward_constant"
    assert "all of the last 40 episodes had reward 0, so" in advice["text"]
    assert lines[0]["advice"] == []
    assert any(advice in line["advice"] for line in lines)


class LostStore:
    """A store that is away for good, which shows once advice is asked to end."""

    def __init__(self) -> None:
        self.is_ending = threading.Event()

    def run(self, operation: Operation[Any]) -> Any:
        assert self.is_ending.wait(30)
        raise StoreError("it is away")


def test_advice_ends_with_its_thread_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisor_thread, "CLOSE_S", 60.0)
    store = LostStore()
    advisor = AdvisorThread(tiny_settings(tmp_path), store, NO_VOCABULARY)  # type: ignore[arg-type]
    put = advisor._queue.put

    def put_and_tell(*arguments: Any, **named: Any) -> None:
        store.is_ending.set()
        put(*arguments, **named)

    monkeypatch.setattr(advisor._queue, "put", put_and_tell)
    advisor.advice = (Advice("old", "text"),)
    batch = SimpleNamespace(step=1, sampled=[make_episode()], filtered_groups=0)
    trained, figures = SimpleNamespace(divergence=SimpleNamespace()), SimpleNamespace()
    advisor.start()

    for _ in range(9):
        advisor.see(batch, trained, figures, seconds={"wait": 1.0}, dropped={})  # type: ignore[arg-type]
    began = time.monotonic()
    advisor.close()

    assert advisor.advice == ()
    assert time.monotonic() - began < 30, "it waits for no room in a queue that nobody empties"


class LeasedInBetween(RetryingStore):
    """A store whose first look after each batch finds no task leased, as when a batch has ended."""

    looks = 0

    def run(self, operation: Operation[Any]) -> Any:
        answer = super().run(operation)
        if isinstance(answer, Stats):
            self.looks += 1
            return replace(answer, leased=0 if self.looks == 1 else 8)
        return answer


def test_actors_are_looked_at_between_batches_and_not_as_one_ends(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisor_thread, "ASK_EVERY_S", 0.01)
    settings = tiny_settings(tmp_path)
    no_divergence = Divergence(*[0.0] * len(fields(Divergence)))  # type: ignore[arg-type]
    trained: Any = SimpleNamespace(divergence=no_divergence)
    with (
        Store(redis_url, run=settings.run.name) as store,
        structlog.testing.capture_logs() as logs,
    ):
        begin_run(store, settings.run)
        store.run(operations.actor_seen({"a": {"version": "1.0"}}))
        watched = LeasedInBetween(store)
        advisor = AdvisorThread(settings, watched, NO_VOCABULARY)
        advisor.start()
        for step in range(1, 13):
            wait_until(lambda: watched.looks >= 5)
            batch: Any = SimpleNamespace(
                step=step, sampled=[make_episode()], filtered_groups=0, tokens=FreshTokens()
            )
            figures = batch_figures(batch.sampled, step=step, lineage=1, lineages={1: 0}, uses={})
            advisor.see(batch, trained, figures, seconds={"wait": 0.0, "all": 1.0}, dropped={})
            watched.looks = 0
        advisor.close()

    assert advisor.fleet.present == 1
    assert {line["batches"] for line in logs if line["event"] == "advice"} == {12}
    assert not [line for line in logs if line.get("rule") == "actors_wait"]


def test_a_pause_is_advised_although_no_batch_comes(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisor_thread, "ASK_EVERY_S", 0.02)
    settings = tiny_settings(tmp_path)
    with (
        Store(redis_url, run=settings.run.name) as store,
        redis.Redis.from_url(redis_url) as client,
        structlog.testing.capture_logs() as logs,
    ):
        advisor = AdvisorThread(settings, RetryingStore(store), NO_VOCABULARY)
        advisor.start()

        client.hset(f"nyala:{{{settings.run.name}}}:meta", "paused", f"11 died, of: {WHERE}")
        wait_until(lambda: bool(advisor.advice))
        (advice,) = advisor.advice
        assert store.run(operations.resume())
        wait_until(lambda: not advisor.advice)
        advisor.close()

    assert (advice.rule, WHERE in advice.text) == ("leasing_paused", True)
    (logged,) = [line for line in logs if line["event"] == "ADVICE"]
    assert logged["text"] == advice.text
