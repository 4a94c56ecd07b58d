"""Demonstrations in tokens: rows to imitate, with a mask of the tokens that are trained.

A folder with one array a file, so that a process maps what it reads into memory. Loads without
torch.

Shapes: R rows, T tokens of all rows.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from configs.errors import RecordError

TOKENS, TRAINED, BOUNDS = "token_ids.npy", "is_trained.npy", "bounds.npy"
NUM_HELD_OUT = "num_held_out.npy"


class DemonstratedRow(NamedTuple):
    """The tokens of a row, and which of them are targets."""

    token_ids: npt.NDArray[np.int32]
    is_trained: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Demonstrations:
    """All rows. Producer: an export of the actors. Consumer: all ranks of the learner."""

    token_ids_T: npt.NDArray[np.int32]
    is_trained_T: npt.NDArray[np.bool_]
    """Never true for the first token of a row, which nothing predicts."""
    bounds: npt.NDArray[np.int64]
    """Begin of each row, and T. Shape [R + 1]."""
    num_held_out: int = 0
    """The last rows, which are set aside."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> DemonstratedRow:
        part = slice(self.bounds[row], self.bounds[row + 1])
        return DemonstratedRow(self.token_ids_T[part], self.is_trained_T[part])

    @property
    def num_trained(self) -> int:
        """Rows to train on: those before the ones that are set aside."""
        return len(self) - self.num_held_out

    @property
    def digest(self) -> str:
        """Hash of all rows."""
        digest = hashlib.blake2b(b"%d" % self.num_held_out, digest_size=16)
        for values in (self.bounds, self.token_ids_T, self.is_trained_T):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    @classmethod
    def read(cls, folder: Path) -> Demonstrations:
        """Map the rows in a folder into memory.

        Raises:
            RecordError: The folder does not hold rows.
        """
        try:
            token_ids_T, is_trained_T, bounds = (
                np.load(folder / name, mmap_mode="r") for name in (TOKENS, TRAINED, BOUNDS)
            )
            num_held_out = int(np.load(folder / NUM_HELD_OUT))
        except (OSError, ValueError) as error:
            raise RecordError(
                f"{folder} must hold demonstrations in tokens, got none ({error}); write them "
                "with `python -m actors export`"
            ) from error
        return cls(token_ids_T, is_trained_T, bounds, num_held_out)


class DemonstrationsWriter:
    """Collects rows, and writes them.

    Example:
        writer = DemonstrationsWriter()
        writer.add([5, 7, 1], [False, True, True])
        writer.write(folder)
    """

    def __init__(self) -> None:
        self._sides = {is_held_out: _Rows() for is_held_out in (False, True)}

    def add(
        self, token_ids: Sequence[int], is_trained: Sequence[bool], *, is_held_out: bool = False
    ) -> None:
        """Add a row, of which at least one token behind the first is trained."""
        assert len(token_ids) == len(is_trained)
        assert any(is_trained[1:])
        rows = self._sides[is_held_out]
        rows.token_ids.extend(token_ids)
        rows.is_trained += bytes([False, *is_trained[1:]])
        rows.lengths.append(len(token_ids))

    def write(self, folder: Path) -> None:
        """Write the rows into an existing folder, those that are set aside last."""
        trained, held_out = self._sides[False], self._sides[True]
        lengths = np.array([*trained.lengths, *held_out.lengths], dtype=np.int64)
        is_trained = bytes(trained.is_trained + held_out.is_trained)
        np.save(folder / TOKENS, np.array(trained.token_ids + held_out.token_ids, dtype=np.int32))
        np.save(folder / TRAINED, np.frombuffer(is_trained, dtype=np.bool_))
        np.save(folder / BOUNDS, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        np.save(folder / NUM_HELD_OUT, np.array(len(held_out.lengths)))


@dataclass(slots=True)
class _Rows:
    """Rows, one behind the other."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    is_trained: bytearray = field(default_factory=bytearray)
    lengths: array[int] = field(default_factory=lambda: array("q"))
