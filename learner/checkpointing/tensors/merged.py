"""The tensors of a model with the adapters of a checkpoint: whole, one at a time, in no rank.

The base is read from the run's model and rounded to the dtype that is published, as the learner
did. A stand-in for `Shards` where they are exported.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from broker.protocol.manifest import digest_of
from broker.weights.low_rank import add_low_rank
from configs.errors import CheckpointError
from learner.model.lora.adapters import Adapter, bytes_of
from learner.model.saved_model import SavedWeights, empty_causal_lm
from learner.weights.wire.layout import published

from .shards import Shards


class MergedTensors:
    """Base and adapters, by the names that a checkpoint of the whole model would have."""

    def __init__(
        self, shards: Shards, adapter: Adapter, *, prefix: str, model_path: str, dtype: torch.dtype
    ) -> None:
        """Open the base, and compare it with the one that was trained.

        Args:
            shards: With the adapters.
            adapter: Their identity.
            prefix: Of the names of the model's tensors.
            model_path: Of the base.
            dtype: Published.

        Raises:
            CheckpointError: The base is another one.
        """
        self._shards, self._adapter, self._prefix, self._dtype = shards, adapter, prefix, dtype
        model = empty_causal_lm(model_path)
        self._base = SavedWeights(model, model_path)
        self.shapes = {f"{prefix}{name}": shape for name, shape in self._base.shapes.items()}
        found = digest_of(bytes_of(self._of_base(name)) for name, _ in published(model))
        if found != adapter.base:
            raise CheckpointError(
                f"run.model must be the one that the adapters were trained with, whose digest is "
                f"{adapter.base[:12]}, got {found[:12]} in {Path(model_path)}; restore it"
            )

    def read_whole(self, name: str) -> Tensor:
        """Return a tensor with its adapter, if it has one."""
        whole = self._of_base(name.removeprefix(self._prefix)).float()
        a, b = (f"{name.removesuffix('weight')}lora_{part}" for part in "ab")
        if a in self._shards.shapes:
            factors = self._shards.read_whole(b), self._shards.read_whole(a)
            add_low_rank(whole, *factors, scale=self._adapter.scale)
        return whole

    def _of_base(self, name: str) -> Tensor:
        return self._base.read(name).to(self._dtype)
