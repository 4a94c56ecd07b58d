"""A learner whose rewards are all the same, on a real store: its files have the advice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer.operations.operation import Operation
from configs.errors import StoreError
from learner.model.ranks import Ranks
from learner.reporting.advice.advisor_thread import AdvisorThread
from learner.reporting.advice.gathering import NO_VOCABULARY
from learner.reporting.advice.rule import Advice
from tests.learner.support import ring_in_process
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.ring_in_process import RingInProcess
from tests.learner.support.tiny_run import tiny_settings


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
    (advice,) = json.loads((folder / "summary.json").read_text())["advice"]
    assert advice["rule"] == "reward_constant"
    assert "all of the last 40 episodes had reward 0, so" in advice["text"]
    assert lines[0]["advice"] == []
    assert any(advice in line["advice"] for line in lines)


class LostStore:
    """A store that is away for good; nothing else of it is asked."""

    def run(self, operation: Operation[Any]) -> Any:
        raise StoreError("it is away")


def test_advice_ends_with_its_thread_and_training_does_not(tmp_path: Path) -> None:
    advisor = AdvisorThread(tiny_settings(tmp_path), LostStore(), NO_VOCABULARY)  # type: ignore[arg-type]
    advisor.advice = (Advice("old", "text"),)
    batch = SimpleNamespace(step=1, episodes=[make_episode()], filtered_groups=0)
    trained = SimpleNamespace(divergence=SimpleNamespace())
    advisor.start()

    for _ in range(9):
        advisor.see(batch, trained, policy_lag=0.0, seconds={"wait": 1.0}, dropped={})  # type: ignore[arg-type]
    advisor.close()

    assert advisor.advice == ()
