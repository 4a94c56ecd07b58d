"""A ring whose processes are started one by one, so that each may end and begin elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from broker.transport.keys import make_client, make_keys
from buffer import operations
from buffer.operations.values import ActorSeen
from buffer.store import Store
from configs.errors import StoreError
from configs.loader import load, save
from console.run.user_files import with_value
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 240.0


class RingByHand:
    """Broker, learner and actors of `tiny.yaml`, over a Redis that is there.

    Args:
        folder: Of keys, logs, the model, and the learner's first run folder.
        url: Of Redis.
        overrides: Of settings.
    """

    _models: ClassVar[dict[tuple[str, ...], Path]] = {}
    """The model that the first ring of a test session made, by the overrides that it depends on."""

    def __init__(self, folder: Path, url: str, *overrides: str) -> None:
        self.folder, self.url = folder, url
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.keys = make_keys(folder / "keys")
        settings = load(
            REPOSITORY / "configs" / "tiny.yaml",
            [
                f"run.directory={folder / 'first'}",
                f"broker.keys={self.keys}",
                "learner.warm_start_steps=0",
                "learner.lr=1e-6",
                *overrides,
            ],
        )
        save(settings, folder / "init.yaml")
        model = settings.run.folder / "init"
        decisive = ("learner.init_", "learner.warm_start_", "run.environment")
        made_from = tuple(sorted(each for each in overrides if each.startswith(decisive)))
        earlier = self._models.setdefault(made_from, model)
        if earlier.exists():
            shutil.copytree(earlier, model)
        else:
            self._call("nyala", "init-model", str(folder / "init.yaml"))
        self.settings = with_value(settings, "run", "model", str(model))
        save(self.settings, folder / "config.yaml")

    def start(
        self, name: str, package: str, *flags: str, teacher: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start a process, with its log in the folder; `flags` are settings, `key=value`."""
        given = [text for flag in flags for text in ("--set", flag)]
        if package == "actors":
            make_client(self.keys, name)
            given += ["--name", name, "--key", name]
        if teacher:
            given += ["--teacher", teacher]
        command = ("-m", package, "--config", str(self.folder / "config.yaml"), *given)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes[name] = process
        return process

    def log(self, name: str) -> list[dict[str, Any]]:
        """Lines that a process has logged."""
        text = (self.folder / f"{name}.log").read_text().rpartition("\n")[0]
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def rows(self, life: str, name: str) -> list[dict[str, Any]]:
        """Rows of a learner's file, below `first` or another directory of runs."""
        path = self.folder / life / self.settings.run.name / f"{name}.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def version(self) -> int:
        """Batches trained; -1 before the run has begun."""
        with Store(self.url, self.settings.run.name) as store:
            try:
                return store.run(operations.stats()).version
            except StoreError:
                return -1

    def actors(self) -> list[ActorSeen]:
        """Actors as the store knows them."""
        with Store(self.url, self.settings.run.name) as store:
            try:
                return store.run(operations.actors())
            except StoreError:
                return []

    def until(self, holds: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> float:
        """Wait; returns the seconds that it took."""
        began = time.monotonic()
        wait_until(holds, lambda: f"{what}: late\n{self.logs()}", timeout_s=within_s)
        return time.monotonic() - began

    def logs(self) -> str:
        """The end of every log."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-2500:]}" for file in files)

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    @property
    def _environment(self) -> dict[str, str]:
        names = {"NYALA_REDIS_URL": self.url, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        return os.environ | names

    def _call(self, *command: str) -> None:
        program = [sys.executable, "-c", "from console.main import app; app()", *command[1:]]
        subprocess.run(program, env=self._environment, check=True, capture_output=True)


def assert_one_history(ring: RingByHand, steps: int, *lives: str) -> None:
    """Batches of all lives are one history, no group is in two, and every task has one end."""
    rows = [row for life in lives for row in ring.rows(life, "batches")]
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    groups = [group for row in rows for group in row["group_ids"]]
    assert len(groups) == len(set(groups))
    with Store(ring.url, ring.settings.run.name) as store:
        stats = store.run(operations.stats())
    assert (stats.state, stats.dead, stats.leased) == ("ENDED", 0, 0)
    assert stats.created == stats.committed + sum(stats.dropped.values()) + stats.cancelled
