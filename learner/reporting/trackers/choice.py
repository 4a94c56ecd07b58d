"""The trackers that the settings name."""

from __future__ import annotations

from configs.settings import RunSettings, TrackerSettings

from .kinds.mlflow_run import MlflowRun
from .kinds.tensorboard_events import TensorboardEvents
from .kinds.trackio_run import TrackioRun
from .kinds.wandb_run import WandbRun
from .tracker import Tracker


def trackers_of(chosen: TrackerSettings, run: RunSettings) -> dict[str, Tracker]:
    """Make them, by their keys in `trackers`; none has begun."""
    trackers: dict[str, Tracker] = {}
    if chosen.tensorboard:
        trackers["tensorboard"] = TensorboardEvents(run.folder)
    if chosen.wandb is not None:
        trackers["wandb"] = WandbRun(chosen.wandb, run)
    if chosen.mlflow is not None:
        trackers["mlflow"] = MlflowRun(chosen.mlflow, run)
    if chosen.trackio is not None:
        trackers["trackio"] = TrackioRun(chosen.trackio, run)
    return trackers
