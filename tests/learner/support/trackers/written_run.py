"""A run's files as the learner writes them, and a tracker that keeps all it gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from learner.reporting.journal import Journal
from learner.reporting.samples import Origin, SampleFiles, encoded, sample_line
from learner.reporting.trackers.tracker import Parameters, SampleTable, TrackedFigures
from tests.learner.support.made_episodes import make_episode


class WrittenRun:
    """The folder of a run whose lines have few keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder)
        self.samples = SampleFiles(folder, max_bytes=2**26)
        self.samples.rewind(0)
        self.newest = 0
        """Batch."""

    def train(self, step: int, *, reward: float = 0.5) -> None:
        """Write the line of a batch."""
        self.newest = step
        self.journal.append("metrics", {"step": step, "time": 1e9 + step, "reward_mean": reward})

    def evaluate(self, step: int, accuracy: float) -> None:
        """Write the line of an evaluation."""
        self.journal.append("eval", {"step": step, "accuracy": accuracy})

    def keep(self, step: int, *, episodes: int = 1, text: str = "abc", kind: str = "train") -> None:
        """Write sampled texts of a batch or an evaluation."""
        made = [make_episode(task, purpose=kind) for task in range(episodes)]
        origin = Origin(step, 1, "spell", 0 if kind == "eval" else None)
        self.samples.append(encoded([sample_line(origin, each, lambda _: text) for each in made]))


class KeepingTracker:
    """Stands for any tracker: keeps what it gets, and raises what it is told to."""

    def __init__(self) -> None:
        self.points: list[TrackedFigures] = []
        self.tables: list[SampleTable] = []
        self.models: list[Path] = []
        self.begun: list[str | None] = []
        self.ends: list[bool] = []
        self.fault: Callable[[], None] = lambda: None
        self.has_more = threading.Condition()

    def check_requirements(self) -> None:
        """It needs nothing."""

    def start_run(self, run_id: str | None, parameters: Parameters) -> str:
        self.fault()
        self.begun.append(run_id)
        return "the run"

    def log(self, points: Sequence[TrackedFigures]) -> None:
        self.fault()
        with self.has_more:
            self.points += points
            self.has_more.notify_all()

    def table(self, table: SampleTable) -> None:
        self.fault()
        with self.has_more:
            self.tables.append(table)
            self.has_more.notify_all()

    def take_model(self, folder: Path, on_progress: Callable[[], None]) -> None:
        self.fault()
        self.models.append(folder)

    def end_run(self, *, is_finished: bool) -> None:
        self.ends.append(is_finished)

    @property
    def steps(self) -> list[int]:
        """Of all points, in the order of their arrival."""
        return [point.step for point in self.points]

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for something to arrive, for a minute at most."""
        with self.has_more:
            assert self.has_more.wait_for(until, 60)
