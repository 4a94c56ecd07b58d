"""`trackers`: experiment trackers that get the run's figures and sampled texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import SettingsTable

Name = Annotated[str, Field(min_length=1, max_length=128)]


class WandbSettings(SettingsTable):
    """A run of Weights & Biases."""

    project: Name = "nyala"
    """Project of the run.

    Change it to group runs of one experiment."""
    entity: Name | None = None
    """User or team; null = the account's default.

    Set it when the project belongs to a team."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` = written into the run's folder, for `wandb sync`; `online` = sent at once, with
    the key of `WANDB_API_KEY`.

    Set it to `online` when the machine has a key and reaches W&B."""


class MlflowSettings(SettingsTable):
    """A run on an MLflow server."""

    url: str
    """Address of the server, such as `http://127.0.0.1:5000`.

    Give it the address of your server."""
    experiment: Name = "nyala"
    """Experiment of the run; made if it is missing.

    Change it to group runs of one experiment."""
    register_as: Name | None = None
    """Name in the model registry under which the finished model is uploaded; null = no upload.

    Set it when others use models from the registry."""


class TrackioSettings(SettingsTable):
    """A run on a trackio server."""

    url: str
    """Address of the server, such as `http://127.0.0.1:7860`.

    Give it the address of your server."""
    project: Name = "nyala"
    """Project of the run.

    Change it to group runs of one experiment."""


class TrackerSettings(SettingsTable):
    """Trackers that get figures and sampled texts too; none by default."""

    tensorboard: bool = False
    """Write events into `<run>/tensorboard` (extra `tensorboard`).

    Set it to true to watch runs in TensorBoard."""
    wandb: WandbSettings | None = None
    """Weights & Biases (extra `wandb`): `project`, `entity`, `mode`; `{}` = all by default.

    Set it to follow runs there."""
    mlflow: MlflowSettings | None = None
    """A server of MLflow: `url`, `experiment`, `register_as`.

    Set it to follow runs there, or to register their models."""
    trackio: TrackioSettings | None = None
    """A server of trackio: `url`, `project`.

    Set it to follow runs there."""
