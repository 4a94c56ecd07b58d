"""A live run under fault injection: `nyala up` in its own process, with actors beside it.

Starts, observes and ends the run. `up` supervises Redis, broker and learner as it does in any run.
The actors are started here, like those of a spot market: a killed actor is replaced at once, and an
actor may be put behind a proxy.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from buffer import operations
from buffer.operations.values import Stats
from buffer.store import Store
from configs.errors import NyalaError, StoreError
from configs.loader import load
from configs.secrets import VARIABLE
from configs.settings import Settings
from console.run.plan import environment_of
from console.run.process import Command, Process
from console.run.process_guard import ProcessGuard
from console.run.run_folder import RunFolder

from .actor_fleet import Fleet, descendants, plays

START_S = 240.0  # a whole ring on two busy cores
STOP_S = 60.0
POLL_S = 0.02
STALL_S = 240.0
"""A wait that takes longer has failed: no fault here lasts longer than a quarter of that, and on a
machine with other work a learner takes a minute to start."""

NEEDED = (
    "run.steps=1000000",  # it is stopped from outside
    "run.eval_every=0",
    "run.eval_episodes=0",
    "buffer.url=null",
    "actors.count=0",
    "broker.endpoint=tcp://127.0.0.1:0",
    "console.max_restarts=1000",
)
SMALL = (
    "actors.engine=torch",
    "actors.heartbeat_s=0.3",
    "actors.snapshot_s=0.1",
    "actors.max_concurrent_episodes=16",
    "broker.lease_timeout_s=3",
    "broker.long_poll_s=0.5",
    "learner.checkpoint_every=3",
    # Random weights end an episode once in a hundred tokens, so faults meet unfinished episodes.
    # They must stay random: a policy that learns the task ends episodes after five tokens.
    "learner.warm_start_steps=0",
    "learner.lr=1e-6",
    "run.max_completion_tokens=128",
)
"""The default run: tiny.yaml, long episodes, short leases."""


class ExpectationFailed(NyalaError):
    """An expected consequence of a fault did not come."""


class LiveRun:
    """One run folder and the processes that work on it."""

    def __init__(
        self,
        config: Path,
        overrides: Sequence[str],
        folder: Path,
        guard: ProcessGuard,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            config: Settings of the run.
            overrides: Settings as for `--set`; they override all settings but the run's folder.
            folder: Folder of the run.
            guard: Ends all processes if this one is killed.
            variables: Environment variables of all processes.
        """
        self.folder = RunFolder(folder)
        self._guard = guard
        self._variables = dict(variables or {})
        flags = [*overrides, f"run.name={folder.name}", f"run.directory={folder.parent}"]
        arguments = [text for flag in flags for text in ("--set", flag)]
        program = (sys.executable, "-c", "from console.main import app; app()")
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        root = str(Path(__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(
            [root, *filter(None, [environment.get("PYTHONPATH")])]
        )
        environment |= self._variables
        self._up = Process(
            Command(
                "up",
                "up",
                (*program, "up", str(config), "--plain", *arguments),
                folder.parent / f"{folder.name}.log",
                environment,
            ),
            guard,
        )
        self.place: object = None
        """The function that made the surroundings of the run; None = it has none of its own."""
        self.sleep: Callable[[float], None] = time.sleep
        """Sleeps during waits; faults that take turns replace it."""
        self.store: Store
        self.settings: Settings
        self.fleet: Fleet

    def start(self, num_actors: int) -> None:
        """Start the run and wait until it trains, which may take twice four minutes.

        Raises:
            ExpectationFailed: The run does not train.
        """
        self._up.start()
        self.until(
            lambda: self.pids("broker") and self.folder.redis_url.exists(), "a broker", START_S
        )
        self.settings = load(self.folder.config)
        self.store = Store(self.url, run=self.settings.run.name)
        self.fleet = Fleet(
            self.folder,
            self.store,
            self._guard,
            self.actor_environment,
            stop_timeout_s=self.settings.console.stop_timeout_s,
        )
        for _ in range(num_actors):
            self.fleet.add()
        self.until(lambda: self.fleet.all_serve() and self.step >= 2, "training", START_S)

    def close(self) -> None:
        """Stop everything in order; kill actors after `console.stop_timeout_s`, `up` after 60 s."""
        if hasattr(self, "fleet"):
            self.fleet.close()
            self.store.close()
        self._up.ask_to_stop()
        deadline = time.monotonic() + STOP_S
        while self._up.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._up.kill()

    @property
    def url(self) -> str:
        """URL of the run's own Redis, with its password."""
        return self.folder.redis_url.read_text(encoding="utf-8").strip()

    @property
    def step(self) -> int:
        """Batches trained; 0 while the store is out of reach."""
        try:
            return self.stats().version
        except StoreError:
            return 0

    def stats(self) -> Stats:
        """Read the state of the run from the store.

        Raises:
            StoreError: The store does not answer.
        """
        return self.store.run(operations.stats())

    def pids(self, role: str) -> list[int]:
        """List the live processes of `redis`, `broker`, `learner` or `publisher`.

        Raises:
            ExpectationFailed: `nyala up` has ended.
        """
        leader = self._up.pid
        if leader is None or self._up.poll() is not None:
            raise ExpectationFailed(
                f"`nyala up` must keep running, got its exit; look into {self.log}"
            )
        return sorted(pid for pid, words in descendants(leader).items() if plays(role, words))

    @property
    def up_pid(self) -> int | None:
        """The process of `nyala up`."""
        return self._up.pid

    @property
    def actor_environment(self) -> dict[str, str]:
        """Environment of actors beside `nyala up`."""
        return environment_of("actor", self.settings) | self._variables

    @property
    def all_pids(self) -> list[int]:
        """List every process of the run: what `nyala up` started, and the actors beside it."""
        leader = self._up.pid
        if leader is None:
            return []
        actors = [actor.pid for actor in self.fleet.actors]
        return [leader, *descendants(leader), *actors]

    @property
    def log(self) -> Path:
        """File of the output of `nyala up`."""
        return self.folder.path.parent / f"{self.folder.path.name}.log"

    def wait_for_checkpoint(self) -> None:
        """Wait without pauses until the next checkpoint is on disk; its commit follows at once.

        Raises:
            ExpectationFailed: No checkpoint comes within four minutes.
        """
        newest = self.folder.newest_checkpoint()
        self._catch(lambda: self.folder.newest_checkpoint() != newest, "a checkpoint")

    def wait_for_save(self) -> None:
        """Wait until the next checkpoint is being written, without pauses.

        Raises:
            ExpectationFailed: No checkpoint is written within four minutes.
        """
        self._catch(lambda: not self.is_saving, "the end of a save")
        self._catch(lambda: self.is_saving, "a checkpoint that is being written")

    @property
    def is_saving(self) -> bool:
        """Whether an incomplete checkpoint is on disk."""
        return any(self.folder.checkpoints.glob(".unfinished-*"))

    def _catch(self, condition: Callable[[], bool], what: str) -> None:
        """Wait without pauses for a condition that may hold only for milliseconds."""
        deadline = time.monotonic() + STALL_S
        while not condition():
            if time.monotonic() > deadline:
                raise ExpectationFailed(
                    f"{what} must come within {STALL_S:g} s, got none; look into {self.log}"
                )

    def until(
        self,
        condition: Callable[[], object],
        what: str,
        limit_s: float = STALL_S,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait for a condition.

        Args:
            condition: Returns whether the wait is over.
            what: Name of the condition for the error, as a noun: `a checkpoint`.
            limit_s: Longest wait.
            look: Called before each try.

        Raises:
            ExpectationFailed: The condition did not come in time, or `nyala up` has ended.
        """
        deadline = time.monotonic() + limit_s
        while True:
            look()
            if condition():
                return
            if self._up.poll() is not None:
                raise ExpectationFailed(
                    f"{what} must come, got the exit of `nyala up` before; look into {self.log}"
                )
            if time.monotonic() > deadline:
                raise ExpectationFailed(
                    f"{what} must come within {limit_s:g} s, got none; look into {self.log}, and "
                    f"into the folder logs of {self.folder.path}"
                )
            self.sleep(POLL_S)
