"""A checkpoint of another run is loaded after a person has named it, and checked first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.errors import CheckpointError, SettingsError
from configs.hashes import settings_hash
from configs.settings import RunSettings
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.manifest import MANIFEST
from learner.checkpointing.resume import trust_checkpoint
from learner.reporting.metrics import Totals
from tests.learner.support.stored_bytes import StoredBytes


def _run(folder: Path, **changes: object) -> RunSettings:
    base: dict[str, Any] = {"name": "r", "directory": folder, "model": "init"}
    return RunSettings(**base, environment="calculator", **changes)


def _state(run: RunSettings, step: int) -> LearnerState:
    return LearnerState(
        run=run.name,
        settings_hash=settings_hash(run),
        step=step,
        lineage=1,
        cursor=step,
        trained=((0, step),),
        totals=Totals(),
    )


def _moved(tmp_path: Path, *steps: int) -> tuple[RunSettings, StoredBytes]:
    """A run whose checkpoints came from elsewhere: with other keys."""
    there, here = _run(tmp_path / "there"), _run(tmp_path / "here")
    theirs = StoredBytes(there.folder, keep=9)
    for step in steps:
        theirs.save_bytes(_state(there, step))
    shutil.copytree(there.folder / "checkpoints", here.folder / "checkpoints")
    return here, StoredBytes(here.folder, keep=9)


def test_a_trusted_checkpoint_becomes_the_runs_own(tmp_path: Path) -> None:
    run, checkpoints = _moved(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"another MAC.*--trust-checkpoint step-000002"):
        checkpoints.newest()

    for _ in range(2):  # to say it again does no harm
        trust_checkpoint(run, "step-000002")
        assert checkpoints.newest() == (
            run.folder / "checkpoints" / "step-000002",
            _state(run, 2),
        )


def test_what_the_message_advises_works_beside_an_own_and_older_checkpoint(tmp_path: Path) -> None:
    run, checkpoints = _moved(tmp_path, 5)
    checkpoints.save_bytes(_state(run, 3))
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[1].step == 3

    trust_checkpoint(run, "step-000005")

    newest = checkpoints.newest()
    assert newest is not None
    assert newest[1].step == 5


def test_a_rollback_names_the_checkpoint_of_another_run_that_it_needs(tmp_path: Path) -> None:
    run, checkpoints = _moved(tmp_path, 2, 4)
    trust_checkpoint(run, "step-000004")
    with pytest.raises(CheckpointError, match="--trust-checkpoint step-000002"):
        checkpoints.newest(before=4)

    trust_checkpoint(run, "step-000002")

    earlier = checkpoints.newest(before=4)
    assert earlier is not None
    assert earlier[1].step == 2


def test_only_a_name_that_is_there_can_be_trusted(tmp_path: Path) -> None:
    run, _ = _moved(tmp_path, 2)

    for name in ("step-000003", "../checkpoints/step-000002", ""):
        with pytest.raises(SettingsError, match="where there is step-000002; name one"):
            trust_checkpoint(run, name)


def test_trust_replaces_neither_the_digests_nor_the_settings(tmp_path: Path) -> None:
    run, _ = _moved(tmp_path, 2, 4)
    folder = run.folder / "checkpoints"
    manifests = [(folder / name / MANIFEST).read_bytes() for name in ("step-000002", "step-000004")]
    (folder / "step-000002" / "state.json").write_text("{}")

    with pytest.raises(CheckpointError, match="must have the digest"):
        trust_checkpoint(run, "step-000002")
    with pytest.raises(CheckpointError, match="with the `run:` settings of now"):
        trust_checkpoint(run.model_copy(update={"group_size": 3}), "step-000004")

    assert manifests == [
        (folder / name / MANIFEST).read_bytes() for name in ("step-000002", "step-000004")
    ]
