"""Checkpoints of a learner without tensors and with one rank: bytes in the place of weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from configs import durable
from learner.checkpointing.checkpoint import Checkpoints, LearnerState

ALONE: Any = SimpleNamespace(is_first=True, rank=0, control=None, barrier=lambda: None)
WEIGHTS = "__0_0.distcp"


class StoredBytes(Checkpoints):
    """Checkpoints whose weights are any bytes."""

    def __init__(self, run_folder: Path, *, keep: int) -> None:
        super().__init__(run_folder / "checkpoints", keep=keep, ranks=ALONE)

    def save_bytes(self, state: LearnerState, weights: bytes = b"weights") -> Path:
        return self.save(state, weights, None)  # type: ignore[arg-type]

    def _save_tensors(self, folder: Path, policy: Any, optimizer: object) -> None:
        durable.DISK.write(folder / WEIGHTS, policy)
