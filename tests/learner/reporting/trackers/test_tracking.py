"""The process of trackers beside rank 0: off by default, and its death costs the run an alert."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.settings import Settings
from learner.reporting.trackers.names import parameters_of
from learner.reporting.trackers.tracking import Tracking
from tests.learner.support.tiny_run import tiny_settings


def with_trackers(folder: Path, **trackers: object) -> Settings:
    tree = tiny_settings(folder).model_dump() | {"trackers": trackers}
    return Settings.model_validate(tree)


def test_nothing_is_started_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    tracking = Tracking(tiny_settings(tmp_path))

    tracking.start()
    tracking.wake()

    assert tracking.alerts() == []
    tracking.close()


def test_the_death_of_the_process_is_an_alert_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("a file where the run's folder should be")
    tracking = Tracking(with_trackers(tmp_path, tensorboard=True))

    tracking.start()
    assert tracking._process is not None
    tracking._process.wait(60)
    for _ in range(3):
        tracking.wake()

    (alert,) = tracking.alerts()
    assert (alert.name, "exit code 1" in alert.text) == ("trackers_ended", True)
    tracking.finish(until=lambda: False)


def test_parameters_are_the_settings_without_secrets() -> None:
    settings = Settings.model_validate(
        {
            "run": {
                "model": "init",
                "environment_settings": {
                    "dataset": "d",
                    "api_key": "s1",
                    "each": [{"Token": "s2"}],
                },
            },
            "buffer": {"url": "redis://user:s3@host:6379/0"},
            "trackers": {"tensorboard": True},
        }
    )

    parameters = parameters_of(settings)

    assert parameters["run.steps"] == 100
    assert parameters["buffer.url"] == "redis://***@host:6379/0"
    assert parameters["run.environment_settings"] == (
        '{"dataset": "d", "api_key": "***", "each": [{"Token": "***"}]}'
    )
    assert not any("s1" in str(each) or "s2" in str(each) for each in parameters.values())
