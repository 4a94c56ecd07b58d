"""The services of compose.yaml in a Docker engine, and the files that their run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).with_name("engine.sh")
VOLUMES = Path(
    os.environ.get("NYALA_ENGINE", "/var/cache/nyala-engine"), "root/var/lib/docker/volumes"
)
LOOK_EVERY_S = 1.0


class Failed(Exception):
    """A check did not hold, or a command failed."""


@dataclass(slots=True)
class Ring:
    """What compose runs of this checkout.

    Args:
        run: Its name, as in the settings.
        variables: Of compose.yaml.
        limit_s: Longest wait for anything.
        folder_of: The volume with the run's folder.
    """

    run: str
    variables: dict[str, str]
    limit_s: float = 400.0
    folder_of: str = "nyala_runs"

    def engine(self, *words: str, with_errors: bool = False) -> str:
        """Run a command where the engine is; return what it printed, also to stderr if so asked.

        Raises:
            Failed: It ended with another code than 0, or not in time.
        """
        given = " ".join(f"{name}={value}" for name, value in self.variables.items())
        try:
            done = subprocess.run(
                [ENGINE, *words],
                cwd=ROOT,
                env=os.environ | {"ENGINE_ENV": given},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(words)}: not within {self.limit_s:g} s") from None
        if done.returncode != 0:
            raise Failed(f"{' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout + done.stderr * with_errors

    def docker(self, *words: str) -> str:
        """Run Docker's client."""
        return self.engine("docker", *words)

    def compose(self, *words: str) -> str:
        """Run compose."""
        return self.docker("compose", "--progress", "plain", *words)

    def inside(self, service: str, *command: str) -> str:
        """Run a command in a container of a service."""
        return self.compose("exec", "-T", service, *command)

    def up(self, actors: int, *flags: str) -> None:
        """Bring all services up, with so many actors."""
        self.compose("up", "--detach", "--scale", f"actor={actors}", *flags)

    def containers(self) -> list[dict[str, Any]]:
        """List the containers, those that have ended too."""
        text = self.compose("ps", "--all", "--format", "json").strip()
        return list(
            json.loads(text) if text.startswith("[") else map(json.loads, text.splitlines())
        )

    def healthy(self, service: str, count: int = 1) -> Callable[[], bool]:
        """Return what tells whether so many containers of a service run, and all are healthy."""

        def is_so() -> bool:
            running = [row for row in self.containers() if row["State"] == "running"]
            found = [row["Health"] for row in running if row["Service"] == service]
            return found == ["healthy"] * count

        return is_so

    def ended(self, service: str) -> int | None:
        """Return the exit code of a service's one container; None while it runs."""
        (row,) = [row for row in self.containers() if row["Service"] == service]
        return row["ExitCode"] if row["State"] == "exited" else None

    def last_line(self, container: str) -> str:
        """Return the newest line that a container has logged."""
        return self.engine("docker", "logs", "--tail", "1", container, with_errors=True).strip()

    def inspect(self, container: str) -> dict[str, Any]:
        """Return all that the engine knows of a container."""
        (found,) = json.loads(self.docker("inspect", container))
        return dict(found)

    def kill_processes(self, container: str) -> None:
        """End a container's first process with SIGKILL from outside, as a lack of memory would."""
        self.engine("run", "kill", "-KILL", str(self.inspect(container)["State"]["Pid"]))

    @property
    def folder(self) -> Path:
        """The run's folder, in its volume."""
        return VOLUMES / self.folder_of / "_data" / self.run

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Read the whole lines of a file of the run."""
        path = self.folder / name
        text = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    @property
    def step(self) -> int:
        """The newest batch that was trained."""
        return max((line["step"] for line in self.lines("metrics.jsonl")), default=0)

    def samplers(self, batches: int) -> Counter[str]:
        """Count who made the episodes of the newest batches."""
        seen = Counter[str]()
        for line in self.lines("metrics.jsonl")[-batches:]:
            seen.update(line["episodes_by_actor"])
        return seen

    def wait(self, what: str, done: Callable[[], bool]) -> float:
        """Wait; return how many seconds it took.

        Raises:
            Failed: It did not come.
        """

        def late() -> str:
            rows = [f"{row['Name']} {row['State']} {row['Health']}" for row in self.containers()]
            return f"{what}: late; " + "; ".join(rows)

        begin = time.monotonic()
        try:
            wait_until(done, late, timeout_s=self.limit_s, every_s=LOOK_EVERY_S)
        except AssertionError as error:
            raise Failed(str(error)) from None
        return time.monotonic() - begin

    def advance(self, batches: int) -> float:
        """Wait for more batches; return how many seconds they took."""
        goal = self.step + batches
        return self.wait(f"{batches} more batches", lambda: self.step >= goal)
