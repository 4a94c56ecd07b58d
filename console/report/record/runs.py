"""A run as its report shows it: read once from the files of its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from configs.errors import SettingsError
from configs.loader import load
from configs.settings import Settings
from console.display.json_lines import Row, number, read_rows
from console.display.progress import accuracies
from console.run.run_folder import RunState, run_folder_of
from learner.reporting.sample_files import read_samples

from .actor_lives import Life, actor_lives
from .answers import Changes, changes_of
from .changed_settings import changed_settings
from .curves import Curves, read_curves
from .derived import accumulated, add_derived
from .figures import KEYS
from .versions import read_versions


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of one evaluation."""

    step: int
    accuracy: float
    spent_s: float
    """Time of the learner from its first batch on, without what lay between its lives."""
    by_environment: Mapping[str, float] = field(default_factory=dict)
    """Where there are several."""


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
    return Run(
        name=settings.run.name,
        folder=folder.path,
        state=folder.state,
        settings=settings,
        changed=changed_settings(settings),
        curves=curves,
        evaluations=_evaluations(read_rows(folder.evaluations), curves),
        summary=folder.read_summary() if folder.state is RunState.FINISHED else {},
        lives=actor_lives(folder.path, curves, max_policy_lag=settings.run.max_policy_lag),
        changes=changes_of(read_samples(folder.path)),
        versions=read_versions(folder.path),
    )


def _evaluations(rows: list[Row], curves: Curves) -> list[Evaluation]:
    """Read evaluations, each at the time of the batch that it followed."""
    spent_s = dict(zip(curves.steps, accumulated(curves.values["durations_s"]), strict=True))
    return [
        Evaluation(
            step=int(number(row, "step")),
            accuracy=number(row, "accuracy"),
            spent_s=spent_s.get(int(number(row, "step")), 0.0),
            by_environment=accuracies(row),
        )
        for row in rows
        if math.isfinite(number(row, "accuracy", default=math.nan))
    ]
