"""A run as its report shows it: read once from the files of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.errors import SettingsError
from configs.loader import load
from configs.settings import Settings
from console.run.run_folder import RunState, run_folder_of
from learner.reporting.sample_files import read_samples

from .actor_lives import Life, actor_lives
from .answers import Changes, changes_of
from .changed_settings import changed_settings
from .curves import Curves, read_curves
from .derived import accumulated, add_derived
from .evaluations import Evaluation, read_evaluations
from .figures import KEYS
from .versions import read_versions


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    name: str
    folder: Path
    state: RunState
    settings: Settings
    changed: Mapping[str, tuple[str, str]]
    """Path of a setting -> value and default, where they differ."""
    curves: Curves
    evaluations: list[Evaluation]
    summary: Mapping[str, object]
    lives: list[Life]
    changes: Changes
    versions: Mapping[str, str]


def read_run(path: Path) -> Run:
    """Read a run, whether it has finished or not.

    Args:
        path: Its folder.

    Raises:
        SettingsError: There is no such run, or it has trained no batch yet.
    """
    folder = run_folder_of(path)
    settings = load(folder.config)
    curves = read_curves(folder.metrics, KEYS)
    if not curves.steps:
        raise SettingsError(
            f"{folder.path} must have trained a batch before there is something to report, got "
            f"none; look at it with `nyala status {folder.path}`"
        )
    add_derived(curves)
    spent_s = accumulated(curves.values["durations_s"])
    return Run(
        name=settings.run.name,
        folder=folder.path,
        state=folder.state,
        settings=settings,
        changed=changed_settings(settings),
        curves=curves,
        evaluations=read_evaluations(
            folder.evaluations, dict(zip(curves.steps, spent_s, strict=True))
        ),
        summary=folder.read_summary() if folder.state is RunState.FINISHED else {},
        lives=actor_lives(folder.path, curves, max_policy_lag=settings.run.max_policy_lag),
        changes=changes_of(read_samples(folder.path)),
        versions=read_versions(folder.path),
    )
