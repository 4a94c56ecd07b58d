"""Checkpoints of a learner without tensors and with one rank: bytes in the place of weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.verification import Files
from learner.model.ranks import Ranks

NO_GROUP = cast("Any", None)
ALONE = Ranks(0, 1, torch.device("cpu"), mesh=NO_GROUP, control=NO_GROUP, background=NO_GROUP)
WEIGHTS = "tensors-0.safetensors"


def stored(weights: bytes) -> Any:
    """Return these bytes in the place of a policy."""
    return SimpleNamespace(adapter=None, weights=weights)


class StoredBytes(Checkpoints):
    """Checkpoints whose weights are any bytes."""

    def __init__(self, run_folder: Path, *, keep: int, **more: Any) -> None:
        super().__init__(run_folder / "checkpoints", keep=keep, ranks=ALONE, **more)

    def save_bytes(self, state: LearnerState, weights: bytes = b"weights") -> Path:
        return self.save(state, stored(weights), None)  # type: ignore[arg-type]

    def _files(self, policy: Any, optimizer: object, *, copied: bool) -> Files:
        return {WEIGHTS: [policy.weights]}
