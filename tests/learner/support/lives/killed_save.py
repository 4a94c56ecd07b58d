"""Learners that are killed: in the middle of a save, and of a run. For `test_kills.py`.

Each case gets a folder of its own, and its ranks are forks: the second of two saves is killed at an
operation of the victim's disk. Runs are those of `resumed_runs.py`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from configs import durable
from configs.durable import Content, Disk
from configs.settings import LearnerSettings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.model.policy import Policy, shard
from learner.model.ranks import join
from learner.model.rendezvous import RENDEZVOUS_FILE
from learner.reporting.metrics import Totals
from learner.training.optimizer import ScheduledOptimizer
from tests.learner.support.lives.resumed_runs import find
from tests.learner.support.tiny_policy import constant_rate, tiny_causal_lm

STATE = LearnerState("r", "h", 1, lineage=1, cursor=0, trained=(), totals=Totals())
OPERATIONS = 15
"""Of the disk, in the save of rank 0 that replaces an older checkpoint."""
CASES = [(1, 0, operation) for operation in range(1, OPERATIONS + 2)]
CASES += [(2, 1, operation) for operation in range(1, 6)]
CASES += [(2, 0, operation) for operation in (1, 4, 11)]
"""Ranks, the victim among them, and the operation that kills it; the last of a rank is too late."""


class KillingDisk(Disk):
    """Kills the process at one of its operations; a write is then half done."""

    def __init__(self) -> None:
        self.operations = 0
        self.kills_at = 0

    def write(self, path: Path, content: Content, mode: int = 0o666) -> None:
        whole = content if isinstance(content, bytes) else b"".join(content)
        if self.operations + 1 == self.kills_at:
            super().write(path, whole[: len(whole) // 2], mode)
        self._count()
        super().write(path, whole, mode)

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        self._count()
        super().make_folder(path, mode)

    def sync(self, path: Path) -> None:
        self._count()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def _count(self) -> None:
        self.operations += 1
        if self.operations == self.kills_at:
            os.kill(os.getpid(), signal.SIGKILL)


def name_of(case: tuple[int, int, int]) -> str:
    """Name the folder of a case."""
    return "-".join(map(str, case))


def train(optimizer: ScheduledOptimizer, step: int) -> None:
    """Take one step, by gradients that need no data."""
    for parameter in optimizer.parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step(step)


def _live(folder: Path, rank: int, case: tuple[int, int, int], policy: Policy) -> None:
    """Save twice, in the background, and write down each COMMIT."""
    size, victim, operation = case
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ[RENDEZVOUS_FILE] = str(folder / "rendezvous")
    disk = durable.DISK = KillingDisk()
    ranks = join("cpu", threads=1)
    policy = shard(policy, ranks.mesh, dtype=torch.float32)
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, ranks=ranks)
    for step in (1, 2):
        train(optimizer, step)
        commit: Callable[[], object] = int
        if ranks.is_first:
            commit = (folder / f"commit-{step}").touch
        checkpoints.begin_save(replace(STATE, step=step), policy, optimizer, then=commit)
        checkpoints.under_way.wait()
        disk.operations, disk.kills_at = 0, operation if rank == victim else 0
    (folder / f"operations-{rank}").write_text(str(disk.operations))


def kill_saves(folder: Path) -> None:
    """Run all cases, one after the other."""
    policy = Policy(tiny_causal_lm(layers=1), temperature=1.0)
    for case in CASES:
        place = folder / name_of(case)
        place.mkdir()
        processes = []
        for rank in range(case[0]):
            process = os.fork()
            if not process:
                try:
                    _live(place, rank, case, policy)
                finally:
                    os._exit(0)
            processes.append(process)
        for process in processes:
            os.waitpid(process, 0)


def kill_all(folder: Path) -> None:
    """Kill saves and runs, and write down how the runs ended."""
    kill_saves(folder)
    for ranks, kind, steps, kills, batch in (
        (1, "values", 9, 3, None),
        (2, "filtering", 6, 0, 5),
    ):
        place = folder / f"runs-{ranks}"
        place.mkdir()
        found = find(place, ranks=ranks, kind=kind, steps=steps, kills=kills, batch=batch, seed=3)
        (folder / f"found-{ranks}.json").write_text(json.dumps(asdict(found)))
