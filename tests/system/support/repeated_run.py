"""Runs that are to be the same bit for bit, and what they are compared by."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.system.support import early_letters
from tests.system.support.live_run import TORCH, LiveRun

REPEATABLE = (
    *TORCH,
    "run.deterministic=true",
    "run.max_policy_lag=0",
    f"run.reward={early_letters.__file__}:early_letters",
    "run.group_size=3",
    "run.groups_per_batch=2",
    # Random weights end an episode once in a hundred tokens, so kills find episodes half done.
    "run.max_completion_tokens=256",
    "learner.warm_start_steps=0",
    "run.eval_every=3",
    "run.eval_episodes=2",
    "actors.max_concurrent_episodes=1",
    "actors.snapshot_s=0.03",
    "learner.device=cpu",
    "learner.checkpoint_every=1",
    "learner.init_layers=6",
    # Twenty kills may meet one task more often than the three times that are its usual share.
    "broker.max_attempts=30",
    "broker.lease_timeout_s=2",
    "broker.heartbeat_timeout_s=1.5",
    "console.max_restarts=100",
)
CURVE = ("loss", "reward_mean", "reward_std", "grad_norm", "entropy", "completion_tokens")


def started(folder: Path, name: str, *overrides: str) -> LiveRun:
    """A run of its own folder, of the same model as the others of this process."""
    place = folder / name
    place.mkdir()
    return LiveRun(place, "tiny.yaml", *REPEATABLE, *overrides)


def curve(run: LiveRun) -> list[dict[str, Any]]:
    """Figures of each batch, exactly, with its groups and the digest of all that it trains on."""
    batches = {line["step"]: line for line in run.lines("batches")}
    return [
        {name: _exact(line[name]) for name in CURVE}
        | {"step": line["step"], "group_ids": batches[line["step"]]["group_ids"]}
        | {"digest": batches[line["step"]].get("digest")}
        for line in run.lines("metrics")
    ]


def weights(run: LiveRun) -> str:
    """Hash of the trained model."""
    model = run.folder / "model" / "model.safetensors"
    return hashlib.sha256(model.read_bytes()).hexdigest()


def _exact(figure: float) -> str:
    return float(figure).hex()


class Kills:
    """Kills of a run's processes, each after a pause that a seed decides."""

    def __init__(self, run: LiveRun, up: subprocess.Popen[str], seed: int) -> None:
        self._run, self._up = run, up
        self._rng = random.Random(seed)
        self.count: Counter[str] = Counter()

    def actors(self, number: int) -> None:
        """Kill so many actors in mid-episode, as long as the run goes on."""
        for _ in range(number):
            self._pause()
            self._run.wait_until(
                lambda: self._has_ended or self._kill_actor(), "an actor is killed"
            )

    def until_one_is_continued(self) -> None:
        """Kill more of them until the tokens of one are in a batch; some had just been finished."""
        for _ in range(6):
            if any(line["resumed_episodes"] for line in self._run.lines("metrics")):
                return
            self.actors(1)
            trained = self._run.step
            self._run.wait_until(
                lambda: self._has_ended or self._run.step > trained + 1,  # noqa: B023 - called at once
                "a batch with what was continued",
            )

    def one(self, role: str) -> None:
        """Kill a process of a role that has one."""
        self._pause()
        self._run.wait_until(lambda: self._has_ended or self._kill_one(role), f"{role} is killed")

    @property
    def _has_ended(self) -> bool:
        return self._up.poll() is not None

    def _pause(self) -> None:
        time.sleep(self._rng.uniform(0.05, 1.0))

    def _kill_actor(self) -> bool:
        """Kill one that has sent tokens of an episode; each is stopped while that is read."""
        actors = list(self._run.actor_processes().items())
        self._rng.shuffle(actors)
        for name, pid in actors:
            os.kill(pid, signal.SIGSTOP)
            is_victim = self._run.half_done(name) > 0
            os.kill(pid, signal.SIGKILL if is_victim else signal.SIGCONT)
            if is_victim:
                self.count["actors"] += 1
                return True
        return False

    def _kill_one(self, role: str) -> bool:
        pids = self._run.pids(role)
        if not pids:
            return False
        os.kill(pids[0], signal.SIGKILL)
        self.count[role] += 1
        return True
