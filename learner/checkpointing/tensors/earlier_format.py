"""Tensors of checkpoints that earlier releases wrote, in torch's distributed format.

Its layout is a pickle, so one is opened only after its manifest was compared with the run's key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from configs.errors import CheckpointError
from learner.checkpointing.manifest import read_manifest
from learner.model.ranks import Ranks

LAYOUT = ".metadata"


def is_earlier_format(folder: Path) -> bool:
    """Return whether its manifest lists a layout; one that was put beside it is not read."""
    return LAYOUT in read_manifest(folder).digests


class EarlierShards:
    """The tensors of such a checkpoint; a stand-in for `Shards`."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder, self._ranks = folder, ranks
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._names: dict[str, str] = {}
        for theirs, layout in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
            if isinstance(layout, TensorStorageMetadata):
                name = theirs.replace("optimizer.state.", "optimizer.", 1)
                self._names[name] = theirs
                self.shapes[name] = tuple(layout.size)
                self.dtypes[name] = layout.properties.dtype

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read this rank's pieces of the named tensors into them; collective.

        Raises:
            CheckpointError: The files do not hold all of them.
        """
        missing = [name for name in tensors if name not in self._names]
        if missing:
            raise CheckpointError(f"{self._folder} must hold {missing[0]}, got none")
        load_tensors(
            {self._names[name]: tensor.detach() for name, tensor in tensors.items()},
            checkpoint_id=self._folder,
            process_group=self._ranks.control,
        )
