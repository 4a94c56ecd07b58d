"""A learner whose rewards are all the same, on a real store: its files have the advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.model.ranks import Ranks
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
