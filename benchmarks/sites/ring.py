"""A ring over far links: the hub's processes in one network, two actors in that of each site.

`nyala up` starts Redis, broker and learner in the hub's; actors are started beside it, with the
small engine. All of them share this machine's cores, and nothing but the links between them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.sites.networks import HUB, FarSites
from benchmarks.support.workload import Workload, environment
from broker.transport.keys import make_client, make_keys
from learner.weights.log import read_weight_log

PORT = 5757
SITES = 2
ACTORS = 2
"""Of each site."""
START_S = 150.0
STOP_S = 20.0
LOOK_S = 0.05
SETTINGS = (
    "run.dtype=bfloat16",
    "run.max_policy_lag=1",
    "run.steps=100000",  # we stop it
    "run.eval_every=0",
    "run.eval_episodes=0",
    "actors.count=0",
    f"broker.endpoint=tcp://{HUB}:{PORT}",
    f"learner.publisher_endpoint=tcp://{HUB}:0",
    "learner.broadcast=false",
    "learner.checkpoint_every=100000",
    "learner.lr=1e-6",
)
PULLED = 'actors.pull_from=["peers","publisher"]'
"""Not out of the learner's memory: that all networks are on one machine is nobody's to know."""


def keys_in(folder: Path) -> Path:
    """Make the keys of hub and actors; returns their folder."""
    keys = make_keys(folder / "keys")
    for number in range(SITES * ACTORS):
        make_client(keys, f"actor-{number}")
    return keys


@dataclass(frozen=True, slots=True)
class Window:
    """What happened while some batches were trained."""

    steps: int
    seconds: float
    tokens: int
    uplink_bytes: int
    waited_s: float
    """That the learner waited for batches."""

    @property
    def step_s(self) -> float:
        """Seconds of a batch."""
        return self.seconds / self.steps


class FarRing:
    """A ring that runs until closed.

    Args:
        workload: Of the run.
        far: Networks.
        is_sited: Whether the actors of a site fetch each version once between them.
    """

    def __init__(self, workload: Workload, far: FarSites, *, is_sited: bool) -> None:
        self._far = far
        self._folder = workload.settings().run.folder
        self._workload = workload
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_sited = is_sited

    def __enter__(self) -> Self:
        flags = [text for flag in self._workload.flags for text in ("--set", flag)]
        program = [sys.executable, "-c", "from console.main import app; app()"]
        up = [*program, "up", str(self._workload.config), "--plain", *flags]
        try:
            self._start(self._far.hub, "hub", up)
            config = self._folder / "config.yaml"
            self._until(config.exists, "the run's folder")
            for number in range(SITES * ACTORS):
                self._start_actor(number, config)
            self._until(lambda: len(self._metrics()) >= 1, "the first batch")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def version_bytes(self) -> int:
        """Bytes of a whole version."""
        lines = read_weight_log(self._folder)
        return int(next(line["num_bytes"] for line in lines if line["event"] == "sealed"))

    def watch(self, steps: int, *, limit_s: float) -> Window:
        """Let so many batches be trained from now on, or fewer in this time."""
        began = self._metrics_after(len(self._metrics()))
        sent = self._far.sent_bytes()
        first = len(began)
        deadline = time.monotonic() + limit_s
        lines = began
        while len(lines) < first + steps and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            lines = self._metrics()
        if len(lines) == first:
            raise RuntimeError(f"no batch was trained within {limit_s:g} s; see {self._folder}")
        seen = lines[first:]
        return Window(
            steps=len(seen),
            seconds=lines[-1]["time"] - lines[first - 1]["time"],
            tokens=sum(line["trained_tokens"] for line in seen),
            uplink_bytes=self._far.sent_bytes() - sent,
            waited_s=sum(line["wait_s"] for line in seen),
        )

    def deliveries(self) -> list[dict[str, Any]]:
        """Lines of `weights.jsonl` about versions that were announced."""
        return [line for line in read_weight_log(self._folder) if line["event"] == "delivered"]

    def _start_actor(self, number: int, config: Path) -> None:
        site = number // ACTORS
        chosen = [PULLED, "actors.weight_timeout_s=120"]
        if self._is_sited:
            chosen += [
                f"actors.site=site-{site}",
                f"actors.share_endpoint=tcp://{self._far.address(site)}:0",
            ]
        name = f"actor-{number}"
        command = [sys.executable, "-m", "actors", "--config", str(config)]
        command += ["--name", name, "--key", name]
        command += [text for flag in chosen for text in ("--set", flag)]
        self._start(self._far.sites[site], name, command)

    def _start(self, network: str, name: str, command: list[str]) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with (self._folder.parent / f"{self._workload.name}-{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", network, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
            )
        self._processes.append(process)

    def _metrics(self) -> list[dict[str, Any]]:
        path = self._folder / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def _metrics_after(self, count: int) -> list[dict[str, Any]]:
        """Wait for the end of the batch under way, so that a window has whole ones."""
        found: list[dict[str, Any]] = []

        def is_more() -> bool:
            found[:] = self._metrics()
            return len(found) > count

        self._until(is_more, "a batch")
        return found

    def _until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not holds():
            ended = [each for each in self._processes if each.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{what} must come, and has not; see {self._folder.parent}")
            time.sleep(LOOK_S)

    def _end(self) -> None:
        for process in reversed(self._processes):  # the hub, which waits for actors, at last
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
