"""A search in place of a grid: optuna proposes the values of each run from the scores so far.

    `points` proposes values -> the sweep runs them -> `tell` takes the score, or that they failed

The study is a file of the sweep's folder, so the same command goes on with it: runs that were
interrupted come first, then new ones. Values are rounded to four digits for the runs.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import SettingsError
from configs.machine import install_command

from .grid import Axis, SweepPoint, named_point

NAME = "study.jsonl"
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
DECADE = 10.0  # a range of more than one is searched by its logarithm


@dataclass(frozen=True, slots=True)
class Range:
    """The bounds between which values of a setting are proposed."""

    low: float
    high: float
    is_whole: bool

    @property
    def is_logarithmic(self) -> bool:
        """Whether values are drawn by their logarithm."""
        return self.low > 0 and self.high >= DECADE * self.low


def range_of(axis: Axis) -> Range | None:
    """Read `1e-7..1e-4`; None where the axis is a list of values.

    Raises:
        SettingsError: The range ends before it begins, or is not of numbers.
    """
    text = axis.values[0]
    low, dots, high = text.partition("..")
    if len(axis.values) > 1 or not dots:
        return None
    if not NUMBER.fullmatch(low) or not NUMBER.fullmatch(high) or float(low) >= float(high):
        raise SettingsError(
            f"a range of {axis.path} must be two numbers, the smaller one first, got "
            f"{text!r}; write --over {axis.path}=1e-7..1e-4"
        )
    return Range(float(low), float(high), is_whole=low.isdecimal() and high.isdecimal())


class Study:
    """Proposes points, and learns from their scores."""

    def __init__(
        self, folder: Path, axes: Sequence[Axis], *, base: str, trials: int, jobs: int
    ) -> None:
        """Open the study of a sweep, or begin it.

        Args:
            folder: Folder of the sweep.
            axes: Ranges and lists of values.
            base: Name that the names of the runs begin with.
            trials: Runs in all, those of earlier sessions included.
            jobs: Runs at a time.

        Raises:
            SettingsError: optuna is not installed.
        """
        if importlib.util.find_spec("optuna") is None:
            raise SettingsError(
                f"--trials must have the package optuna, got none; install the extra `search`: "
                f"{install_command('search')}"
            )
        import optuna  # noqa: PLC0415 - of the extra `search`
        from optuna.storages import JournalStorage  # noqa: PLC0415 - as above
        from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415 - as above

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        self._states = optuna.trial.TrialState
        self._study = optuna.create_study(
            study_name="sweep",
            storage=JournalStorage(JournalFileBackend(str(folder / NAME))),
            direction="maximize",
            load_if_exists=True,
        )
        # By the trials so far: with one seed each session would propose the same first values.
        seed = len(self._study.trials)
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=jobs > 1)
        self._axes = axes
        self._base = base
        self._trials = trials
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of runs in all, or of those that were made if they are more."""
        return max(self._trials, len(self._study.trials))

    def points(self) -> Iterator[SweepPoint]:
        """Yield the points to be made, each when it is asked for; interrupted ones come first."""
        for begun in self._study.get_trials(states=(self._states.RUNNING,)):
            if len(begun.params) == len(self._axes):
                yield self._point(begun)
            else:  # the session ended while it was being proposed
                self._study.tell(begun.number, state=self._states.FAIL)
        while len(self._study.trials) < self._trials:
            trial = self._study.ask()
            for axis in self._axes:
                _suggest(trial, axis)
            yield self._point(trial)

    def made(self) -> list[SweepPoint]:
        """List the points of all runs so far."""
        trials = self._study.trials
        points = [self._point(trial) for trial in trials if len(trial.params) == len(self._axes)]
        return list({point.name: point for point in points}.values())

    def tell(self, name: str, score: float | None) -> None:
        """Learn the score of a run; None = it failed, or has none."""
        if score is None:
            self._study.tell(self._numbers[name], state=self._states.FAIL)
        else:
            self._study.tell(self._numbers[name], score)

    def _point(self, trial: Any) -> SweepPoint:
        values = {axis.path: _written(trial.params[axis.path]) for axis in self._axes}
        point = named_point(values, self._base)
        self._numbers[point.name] = trial.number
        return point


def _suggest(trial: Any, axis: Axis) -> None:
    bounds = range_of(axis)
    if bounds is None:
        trial.suggest_categorical(axis.path, axis.values)
    elif bounds.is_whole:
        low, high = int(bounds.low), int(bounds.high)
        trial.suggest_int(axis.path, low, high, log=bounds.is_logarithmic)
    else:
        trial.suggest_float(axis.path, bounds.low, bounds.high, log=bounds.is_logarithmic)


def _written(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
