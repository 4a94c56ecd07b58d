"""A whole run as a person starts it, `nyala up` in a process of its own, watched from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from buffer import operations
from buffer.store import Store
from configs.errors import StoreError
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
START_S = 240.0  # a whole ring on two busy cores
TORCH = ("actors.engine=torch", "actors.heartbeat_s=0.3", "actors.snapshot_s=0.1")
"""The small engine, with snapshots often enough that a killed actor leaves something behind."""


def _environment() -> dict[str, str]:
    """Return this process's environment, with the repository's code before all other."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


class LiveRun:
    """One run folder and the processes that work on it."""

    _models: ClassVar[dict[tuple[str, ...], Path]] = {}
    """The model that the first run of a test session made, by the overrides that it depends on."""

    def __init__(self, folder: Path, preset: str, *overrides: str, cwd: Path = REPOSITORY) -> None:
        self._parent = folder
        self._cwd = cwd
        self._arguments = [str(REPOSITORY / "configs" / preset), "--plain"]
        for override in (f"run.directory={folder}", "broker.endpoint=tcp://127.0.0.1:0"):
            self._arguments += ["--set", override]
        for override in overrides:
            self._arguments += ["--set", override]
        self.folder = folder / Path(preset).stem
        decisive = ("learner.init_", "learner.warm_start_")
        self._made_from = (preset, *sorted(x for x in overrides if x.startswith(decisive)))

    @contextmanager
    def up(self, *more: str) -> Iterator[subprocess.Popen[str]]:
        """`nyala up`, ended cleanly on the way out if it still runs."""
        self._take_model_of_an_earlier_run()
        process = self.start("up", *self._arguments, *more)
        try:
            yield process
        finally:
            end(process)

    def _take_model_of_an_earlier_run(self) -> None:
        """Spare two processes; `nyala up` makes another if it is not what these settings say."""
        own = self.folder / "init"
        earlier = self._models.setdefault(self._made_from, own)
        if earlier.exists() and not own.exists():
            shutil.copytree(earlier, own)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start any `nyala` command from the repository's code."""
        with (self._parent / f"{arguments[0]}.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-c", "from console.main import app; app()", *arguments],
                cwd=self._cwd,
                env=_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def ask(self, *arguments: str) -> str:
        """What a `nyala` command prints."""
        done = subprocess.run(
            [sys.executable, "-c", "from console.main import app; app()", *arguments],
            cwd=self._cwd,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=True,
        )
        return done.stdout

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What `<name>.jsonl` holds so far."""
        path = self.folder / f"{name}.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def log(self, command: str) -> list[dict[str, Any]]:
        """What the process of a command that was started beside `nyala up` has logged."""
        lines = (self._parent / f"{command}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def step(self) -> int:
        """Batches trained so far."""
        return max((line["step"] for line in self.lines("metrics")), default=0)

    def actors(self) -> set[str]:
        """Incarnations whose episodes have been trained."""
        return {name for line in self.lines("metrics") for name in line["episodes_by_actor"]}

    def half_done(self, name: str) -> int:
        """Tasks that the actor of this name holds and has sent tokens of; 0 without a store."""
        return sum(length > 0 for length in self.held(name))

    def held(self, name: str) -> list[int]:
        """Tokens sent of each task that the actor of this name holds; none without a store."""
        try:
            with Store((self.folder / "redis.url").read_text().strip(), self.folder.name) as store:
                tasks = store.run(operations.inspect()).values()
        except StoreError:
            return []
        return [task.length for task in tasks if task.incarnation.startswith(f"{name}-")]

    def actor_processes(self) -> dict[str, int]:
        """Names of the live actor processes and their ids."""
        found = {}
        for pid in self.pids("actors"):
            with suppress(OSError, ValueError):  # it has just ended, or writes examples
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                found[words[words.index("--name") + 1]] = pid
        return found

    def summary(self) -> dict[str, Any]:
        """`summary.json` of a finished run."""
        parsed: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return parsed

    def pids(self, role: str) -> list[int]:
        """The live processes of a role (`actors`, `learner`, `broker`) of this run."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:  # it has just ended
                continue
            in_this_run = any(str(self.folder) in word for word in words)
            if in_this_run and "-m" in words and words[words.index("-m") + 1] == role:
                found.append(int(entry.name))
        return sorted(found)

    def wait_until(
        self, condition: Callable[[], bool], what: str, *, within_s: float = START_S
    ) -> None:
        """Wait for something that is seen from outside; shows the logs if it does not come."""
        wait_until(condition, lambda: f"{what}: late\n{self.logs()}", timeout_s=within_s)

    def logs(self) -> str:
        """The end of every log."""
        files = [*self._parent.glob("*.log"), *self.folder.glob("logs/*.log")]
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def finish(
        self, process: subprocess.Popen[str], *, within_s: float = START_S
    ) -> dict[str, Any]:
        """Wait for the end of the run, which must be a good one."""
        self.wait_until(lambda: process.poll() is not None, "the run ends", within_s=within_s)
        assert process.returncode == 0, self.logs()
        return self.summary()


def end(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, and a kill if that is not enough."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def assert_nothing_lost_or_repeated(run: LiveRun, summary: dict[str, Any]) -> None:
    """Every task has one end, every batch was trained once, and no group is in two of them."""
    ends = ("tasks_committed", "tasks_dropped", "tasks_dead", "tasks_cancelled")
    assert summary["tasks_created"] == sum(summary[name] for name in ends)
    batches = run.lines("batches")
    assert [line["step"] for line in batches] == list(range(1, summary["steps"] + 1))
    groups = [group for line in batches for group in line["group_ids"]]
    assert len(groups) == len(set(groups))
    assert sum(line["episodes"] for line in run.lines("metrics")) == summary["tasks_committed"]
