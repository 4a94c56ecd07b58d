"""Trackers of a run that trains get every batch once, over lives of the learner and outages."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from configs.settings import Settings
from learner.model.ranks import Ranks
from learner.reporting.trackers import tracking as tracking_module
from learner.reporting.trackers.tracking import Tracking
from tests.learner.support.ring_in_process import LifeEnded, RingInProcess
from tests.learner.support.tiny_run import tiny_settings
from tests.learner.support.trackers.mlflow_stand_in import MlflowStandIn, mlflow_stand_in

STEPS = 6


def settings_of(folder: Path, server: MlflowStandIn) -> Settings:
    run = {"steps": STEPS, "eval_every": 3, "eval_episodes": 2}
    tree = tiny_settings(folder, run=run).model_dump()
    tree["trackers"] = {"mlflow": {"url": server.url, "register_as": "tiny"}}
    return Settings.model_validate(tree)


@pytest.mark.slow
def test_a_tracker_gets_every_batch_once_though_the_learner_is_killed(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    with mlflow_stand_in() as server:
        settings = settings_of(tmp_path, server)
        ring = RingInProcess(settings, redis_url, ranks)
        ring.shelf.end_life_at = 4
        with pytest.raises(LifeEnded):
            ring.live()
        trained = {line["step"] for line in lines(settings)}
        sent = server.steps("train/loss")
        assert ring.live()

    assert sent == sorted(trained)
    assert server.steps("train/loss") == list(range(1, STEPS + 1))
    assert server.steps("eval/accuracy") == [line["step"] for line in lines(settings, "eval")]
    assert [each["status"] for each in server.runs.values()] == ["FINISHED"]
    assert [each["name"] for each in server.versions] == ["tiny"]
    assert any(name.endswith("/model/config.json") for name in server.files)


@pytest.mark.slow
def test_a_server_that_hangs_costs_a_run_no_batch_and_no_alert(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_module, "CLOSE_S", 1.0)
    monkeypatch.setattr(tracking_module, "MODEL_S", 1.0)
    with mlflow_stand_in() as server:
        server.hangs.set()
        settings = settings_of(tmp_path, server)

        assert RingInProcess(settings, redis_url, ranks).live()

    found = lines(settings)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert not any("trackers_ended" in line["alerts"] for line in found)
    assert server.metrics == {}


@pytest.mark.slow
def test_a_process_that_does_not_read_never_makes_the_learner_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_module, "CLOSE_S", 0.1)
    with mlflow_stand_in() as server:
        tracking = Tracking(settings_of(tmp_path, server))
        tracking.start()
        assert tracking._process is not None
        os.kill(tracking._process.pid, signal.SIGSTOP)

        for _ in range(200_000):  # three times what a pipe holds
            tracking.wake()

        assert tracking.alerts() == []
        tracking.close()


def lines(settings: Settings, name: str = "metrics") -> list[dict[str, Any]]:
    text = (settings.run.folder / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
