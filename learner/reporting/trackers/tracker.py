"""The interface of a tracker, and what it gets: figures and sampled texts of a step.

Every tracker is called in a thread of its own, in the order of the run. It raises `OSError` where a
later try may succeed (a server that is away, a full disk), and anything else where it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

Parameters: TypeAlias = Mapping[str, str | int | float | bool | None]
"""`table.key` of each setting -> its value; without secrets."""


@dataclass(frozen=True, slots=True)
class TrackedFigures:
    """Figures of one batch or one evaluation."""

    step: int
    """Batches trained."""
    time: float
    """Unix time."""
    figures: Mapping[str, float]
    """Name with slashes, such as `reward/mean` -> a finite value."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Sampled texts of one batch or one evaluation."""

    name: str
    """`samples/train` or `samples/eval`."""
    step: int
    time: float
    """Unix time of the newest episode."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]


class Tracker(Protocol):
    """One run of one tracker."""

    def check_requirements(self) -> None:
        """Check whether the tracker can work on this machine, before the run.

        Raises:
            SettingsError: A package or a key is missing, or no such server answers.
        """
        ...

    def start_run(self, run_id: str | None, parameters: Parameters) -> str:
        """Continue a run, or begin one where there is none; returns its id."""
        ...

    def log(self, points: Sequence[TrackedFigures]) -> None:
        """Take figures; those of a step may come in several points."""
        ...

    def table(self, table: SampleTable) -> None:
        """Log a table of sampled texts."""
        ...

    def take_model(self, folder: Path, on_progress: Callable[[], None]) -> None:
        """Take the finished model, where the tracker keeps models.

        Args:
            folder: Folder with the model's files.
            on_progress: Must be called between two parts of a long transfer.
        """
        ...

    def end_run(self, *, is_finished: bool) -> None:
        """End this life of the run; a run that has not finished may be continued."""
        ...
