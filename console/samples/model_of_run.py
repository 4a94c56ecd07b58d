"""The newest model of a run, or that of a checkpoint, as a folder that an engine can load."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from configs.architecture import present_model
from configs.settings import Settings
from console.run.run_folder import RunFolder, RunState
from learner.checkpointing.folders import step_of


class ModelOfRun(NamedTuple):
    """A model of a run."""

    name: str
    """Of the checkpoint, or what it is in its place."""
    path: str
    step: int
    """Batches that it was trained on."""


@contextmanager
def model_of(settings: Settings, checkpoint: str | None) -> Iterator[ModelOfRun]:
    """Find or export a model; what is exported is removed afterwards.

    Without a checkpoint's name: that of the end of a finished run, else the newest checkpoint's,
    else the one that the run began with.

    Args:
        settings: Of the run.
        checkpoint: `best`, a step such as `50`, or a name such as `step-000050`.

    Raises:
        CheckpointError: The checkpoint is not there, not intact, or of another run.
        SettingsError: There is no model yet.
    """
    run = settings.run
    folder = RunFolder(run.folder)
    if checkpoint is None and folder.state is RunState.FINISHED and _is_model(folder.model):
        yield ModelOfRun(f"the model after batch {run.steps}", str(folder.model), run.steps)
    elif checkpoint is None and folder.newest_checkpoint() is None:
        yield ModelOfRun("the model that the run began with", present_model(run), 0)
    else:
        from learner.checkpointing.export import export_model  # noqa: PLC0415 - torch
        from learner.checkpointing.inventory import intact  # noqa: PLC0415 - torch

        path = intact(run.folder, _name(checkpoint))
        # Beside the checkpoints: where they have room, a model has.
        with tempfile.TemporaryDirectory(prefix=".try-", dir=run.folder) as scratch:
            exported = Path(scratch) / "model"
            export_model(path, run, exported)
            yield ModelOfRun(path.name, str(exported), step_of(path))


def _name(checkpoint: str | None) -> str | None:
    if checkpoint is None or not checkpoint.isdecimal():
        return checkpoint
    return f"step-{int(checkpoint):06d}"


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists()
