"""Sequences of tokens one after another, without pads: the input of a forward pass.

No sequence sees another: positions count from 0 in each, and attention stays within its bounds.

Shapes: B sequences, T tokens of all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The tokens of B sequences, and where each of them begins."""

    token_ids_T: Tensor
    """Shape [T], int64."""
    positions_T: Tensor
    """Place of each token in its sequence, from 0. Shape [T], int64."""
    bounds: Tensor
    """Begin of each sequence, and T. Shape [B + 1], int32."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, on the host: no kernel waits for them."""

    @classmethod
    def of(cls, sequences: Sequence[npt.ArrayLike]) -> Sequences:
        """Put sequences behind each other; there is at least one, and none is empty."""
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        lengths = tuple(len(array) for array in arrays)
        assert lengths and all(lengths)
        return cls(
            token_ids_T=torch.from_numpy(np.concatenate(arrays)),
            positions_T=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
            bounds=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            lengths=lengths,
        )

    def to(self, device: torch.device) -> Sequences:
        """Copy to a device."""
        return Sequences(
            self.token_ids_T.to(device),
            self.positions_T.to(device),
            self.bounds.to(device),
            self.lengths,
        )

    def equal_runs(self) -> Iterator[tuple[int, int]]:
        """Number and length of neighbours that are equally long."""
        for length, run in itertools.groupby(self.lengths):
            yield len(list(run)), length
