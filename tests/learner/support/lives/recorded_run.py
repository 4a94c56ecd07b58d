"""A run whose episodes all lie in the store before its first life.

No batch depends on the time at which an actor answers. One process imports torch, and forks the
ranks of each life. A life ends where its victim has used so many CPU seconds: SIGPROF ends a
process as SIGKILL does, without a line of its code, and other programs of the machine do not move
the moment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # sharding imports it: once here, and not in each of the forks

from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.record.episode import Episode, PolicyVersion
from buffer.store import Store
from configs.settings import Settings
from learner import assembly, loop
from learner.checkpointing.folders import complete_checkpoints
from learner.checkpointing.recovery import register_run
from learner.checkpointing.tensors import Shards
from learner.data.curriculum import training_tasks
from learner.model.rendezvous import RENDEZVOUS_FILE
from learner.training import step as training_step
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_policy import save_tiny_model
from tests.learner.support.tiny_run import answer_leases, tiny_settings

OF_A_LIFE = {
    "time",
    "idle_fraction",
    "trained_tokens_per_s",
    "lineage",
    "is_replay",
    "advice",
    "actors",
    "actors_wanted",
    "actors_wanted_why",
    "actor_hours",
    "learner_memory_gib",
    "learner_cores",
    "actor_memory_gib",
    "actor_cores",
}
"""Figures of a batch that say when it was trained and in which life, beside seconds (`..._s`)."""
COUNTED_BY_A_LIFE = {"filtered_groups", "dropped_groups", "dropped_by_length"}
"""Drops are not counted again when the batch that they made room for is replayed."""
KINDS: dict[str, dict[str, object]] = {
    "values": {"advantage": "gae", "kl_target": 0.01},
    "filtering": {"filter_zero_variance": True, "max_gen_batches": 100},
    "adapters": {"advantage": "gae"},
}
SPARE_GROUPS = 10


def recorded_settings(folder: Path, name: str, *, ranks: int, steps: int, kind: str) -> Settings:
    """Make the settings of a run in which most of what a checkpoint holds matters."""
    algorithm = KINDS[kind]
    return tiny_settings(
        folder,
        run={
            "name": name,
            "model": str(folder / "model"),
            "steps": steps,
            "groups_per_batch": 4,
            "max_policy_lag": steps * 4 // 3 + SPARE_GROUPS,  # all are begun at once
        },
        learner={
            "ranks": ranks,
            "checkpoint_every": 3,
            "keep_checkpoints": 2,
            "lr_warmup_steps": 3,
            "lr_decay": "cosine",
            "weight_decay": 0.01,
            "microbatch_tokens": 32,
            "lora_rank": 2 if kind == "adapters" else 0,
            "max_claim_attempts": 1000,  # a batch may be killed more often than is usual
        },
        algorithm={
            "num_minibatches": 2,
            "kl_coefficient": 0.05,
            "entropy_target": 3.0,
            **algorithm,
        },
        critic={"kind": "head" if "advantage" in algorithm else "none", "lr": 1e-2},
    )


@dataclass(frozen=True, slots=True)
class Kill:
    """How a life is to end."""

    victim: int
    """Its rank."""
    at_s: float
    """CPU seconds after which it is killed."""
    others_survive_s: float
    """Time until the other ranks are."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run whose episodes are in the store."""

    settings: Settings
    url: str

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.settings.run.folder

    def record(self) -> None:
        """Fill the store as an earlier life, and an actor of its, would have."""
        run = self.settings.run
        if not Path(run.model_path).exists():
            save_tiny_model(Path(run.model_path))
        groups = range(run.steps * run.groups_per_batch * 4 // 3 + SPARE_GROUPS)
        with Store(self.url, run.name) as store:
            register_run(store, run, self.settings.buffer)
            lineage = store.run(operations.begin_lineage(0, 0))
            assert lineage == 1
            tasks = training_tasks(run, groups, {})
            store.run(operations.create(lineage, tasks))
            left = len(tasks)
            while left:
                answered = answer_leases(store, (lineage, 0), _episode)
                assert answered
                left -= answered

    def live(self, *, kill: Kill | None = None) -> bool:
        """Run one life on all ranks: True if it ended the run, False if it was killed.

        Raises:
            RuntimeError: It ended otherwise.
        """
        ends = self._wait(self._fork(kill=kill), survive_s=kill.others_survive_s if kill else 0.0)
        if ends[0] not in (0, -signal.SIGPROF):
            raise RuntimeError(f"a rank ended with {ends[0]}:\n{self.log()}")
        return not ends[0]

    def run_out_of_memory(self, batch: int, rank: int) -> list[int]:
        """Run one life in which that rank runs out of memory in that batch; its exit codes."""
        return self._wait(self._fork(runs_out=(batch, rank)), survive_s=None)

    def log(self) -> str:
        """The end of what all ranks wrote."""
        return (self.folder / "log").read_text(encoding="utf-8")[-6000:]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and moments of policy and critic at the end."""
        shards = Shards(complete_checkpoints(self.folder / "checkpoints")[-1])
        return {name: shards.read_whole(name) for name in shards.shapes}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of the run, less what depends on time and lives."""
        text = (self.folder / f"{name}.jsonl").read_text(encoding="utf-8")
        left_out = OF_A_LIFE | COUNTED_BY_A_LIFE
        return [
            {
                key: value
                for key, value in json.loads(line).items()
                if key not in left_out and not key.endswith("_s")
            }
            for line in text.splitlines()
        ]

    def _fork(
        self, *, kill: Kill | None = None, runs_out: tuple[int, int] | None = None
    ) -> list[int]:
        """Begin a life: a process for each rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        meeting = tempfile.mkdtemp(dir=self.folder.parent)
        sys.stdout.flush()
        processes = []
        for rank in range(self.settings.learner.ranks):
            process = os.fork()
            if not process:
                try:
                    os._exit(self._live(rank, meeting, kill, runs_out))
                finally:
                    os._exit(1)
            processes.append(process)
        return processes

    def _wait(self, processes: list[int], *, survive_s: float | None) -> list[int]:
        """Wait for all ranks, and end the others `survive_s` after one that failed; exit codes."""
        left, ends = set(processes), []
        while left:
            process, status = os.waitpid(-1, 0)
            left.remove(process)
            ends.append(os.waitstatus_to_exitcode(status))
            if ends[-1] and survive_s is not None:
                time.sleep(survive_s)
                for other in left:
                    os.kill(other, signal.SIGKILL)
        return ends

    def _live(
        self, rank: int, meeting: str, kill: Kill | None, runs_out: tuple[int, int] | None
    ) -> int:
        """Be a rank; its exit code."""
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if kill is not None and kill.victim == rank:
            signal.setitimer(signal.ITIMER_PROF, kill.at_s)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.settings.learner.ranks),
            RENDEZVOUS_FILE: f"{meeting}/ranks",
            "NYALA_REDIS_URL": self.url,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        publisher = _Nobody(self.folder / f"began-{rank}")
        with pytest.MonkeyPatch.context() as patch:
            for name in ("WeightPublisher", "FollowerPublisher"):
                patch.setattr(assembly, name, lambda *_, **__: publisher)
            if runs_out is not None and runs_out[1] == rank:
                _run_out_of_memory(runs_out[0], patch)
            try:
                return 0 if assembly.run_learner(self.settings, threading.Event()) else 1
            except Exception:  # noqa: BLE001 - whatever it is, the log has it
                traceback.print_exc()
                return 1


@dataclass(frozen=True, slots=True)
class _Nobody:
    """Publishes to nobody, and writes down when the first version was ready: training begins."""

    began: Path

    def publish(self, _model: object, _version: object, *, free: Any) -> None:
        if not self.began.exists():
            self.began.write_text(str(time.process_time()))
        free()

    def close(self) -> None:
        """Nothing to close."""


def _episode(task_id: int, spec: TaskSpec) -> Episode:
    """Make the episode of a task; in each fifth group all rewards are equal."""
    chance = np.random.default_rng(task_id)
    length = int(chance.integers(1, 9))
    prompt = np.random.default_rng(10**6 + spec.group_id).integers(3, 90, size=4)
    return make_episode(
        task_id,
        group_id=spec.group_id,
        prompt=prompt.tolist(),
        completion=chance.integers(3, 90, size=length).tolist(),
        logprobs=chance.uniform(-5, -3, size=length).tolist(),
        reward=0.5 if spec.group_id % 5 == 4 else float(chance.uniform()),
        versions=[(PolicyVersion(1, 0), 0)],
    )


def _run_out_of_memory(batch: int, patch: pytest.MonkeyPatch) -> None:
    """Have this rank run out of memory in the second pass of a batch."""
    train, accumulate = training_step.train_batch, training_step.accumulate
    passes = 0

    def train_batch(policy: Any, optimizer: Any, step: int, *args: Any, **named: Any) -> Any:
        nonlocal passes
        passes = 2 if step == batch else 0
        return train(policy, optimizer, step, *args, **named)

    def failing(*args: Any) -> Any:
        nonlocal passes
        passes -= 1
        if not passes:
            torch.empty(2**62, dtype=torch.uint8)
        return accumulate(*args)

    patch.setattr(loop, "train_batch", train_batch)
    patch.setattr(training_step, "accumulate", failing)
