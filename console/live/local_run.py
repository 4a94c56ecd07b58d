"""A run of this machine as its files and its store show it, whoever has started it."""

from __future__ import annotations

import time

from configs.errors import SettingsError
from configs.loader import load
from console.display.from_store import with_store
from console.display.newest_sample import NewestSample
from console.display.progress import RunProgress
from console.display.snapshot import View
from console.display.stages import newest_stage
from console.run.actor_watch import ActorWatch, StoreLook
from console.run.run_folder import RunFolder, RunState

LEARNER = "learner"


class LocalRun:
    """Looks at a run's folder, and at its store while one answers.

    Example:
        run = LocalRun(folder)
        display.show(run.look())
        run.close()
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._settings = load(folder.config)
        self.name = self._settings.run.name
        self._progress = RunProgress(folder, steps=self._settings.run.steps)
        self._sample = NewestSample(folder.samples)
        self._url = ""
        self._watch: ActorWatch | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run has finished."""
        return self._folder.state is RunState.FINISHED

    def look(self) -> View:
        """Read what is new."""
        progress, newest = self._progress.look(), self._ask()
        logs = sorted(self._folder.log("*").parent.glob("*.log"))
        stages = {path.stem: stage for path in logs if (stage := newest_stage(path)) is not None}
        learner = stages.get(LEARNER)
        trained_at = self._progress.newest_at
        begun_at = learner.at if learner is not None else 0.0
        alarm = None
        if newest is None and not self._folder.is_held and not self.is_over:
            alarm = f"not running; to go on: nyala up {self._folder.path}"
        elif self._watch is not None and time.time() - max(trained_at, begun_at) >= self._alarm_s:
            alarm = self._watch.idle
        view = View(
            progress,
            {name: stage.name for name, stage in stages.items()},
            (self._watch.alive if self._watch is not None else None) or 0,
            is_training=progress.step > 0 and trained_at >= begun_at,
            alarm=alarm,
            sample=self._sample.look(),
        )
        return with_store(view, newest, self._settings)

    def close(self) -> None:
        """End what looks at the store."""
        if self._watch is not None:
            self._watch.close()

    @property
    def _alarm_s(self) -> float:
        return self._settings.console.alarm_s

    def _ask(self) -> StoreLook | None:
        """Return the newest look at the store, whose address may change with each `nyala up`."""
        try:
            url = self._folder.read_redis_url()
        except (OSError, SettingsError):  # nobody has started it yet, or its owner is another user
            return None
        if url != self._url:
            self.close()
            self._url, self._watch = url, ActorWatch(url, self._settings)
            self._watch.start()
        return None if self._watch is None else self._watch.newest
