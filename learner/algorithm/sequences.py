"""Sequences of tokens one after another, without pads: the input of a forward pass.

A sequence may continue one before it, as completions continue a prompt that is there once: its
positions count on, and it sees that one and itself. No other sequence is seen.

Shapes: S sequences, T tokens of all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The tokens that each sequence sees: those of the one it continues, then its own."""

    places: Tensor
    """Among the T, one sequence after another. int64."""
    bounds: Tensor
    """Begin of each sequence in `places`, and their number. Shape [S + 1], int32."""
    lengths: tuple[int, ...]
    """Tokens that each sequence sees, on the host."""


class Run(NamedTuple):
    """Neighbours that are equally long and see equally many tokens."""

    number: int
    length: int
    seen: int


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The tokens of S sequences, where each begins, and what it continues."""

    token_ids_T: Tensor
    """Shape [T], int64."""
    positions_T: Tensor
    """Place of each token behind the first that its sequence sees, from 0. Shape [T], int64."""
    before_T: Tensor
    """The token before each one, whose state predicts it, among the T; the first that a sequence
    sees has none, and names itself. Shape [T], int64."""
    bounds: Tensor
    """Begin of each sequence, and T. Shape [S + 1], int32."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, on the host: no kernel waits for them."""
    seen: Seen | None
    """None = each sequence sees itself alone."""

    @classmethod
    def of(
        cls, sequences: Sequence[npt.ArrayLike], *, prefixes: Sequence[int | None] | None = None
    ) -> Sequences:
        """Put sequences behind each other; there is at least one, and none is empty.

        Args:
            sequences: Token ids of each.
            prefixes: The number of the earlier sequence that each continues; None = it begins.
        """
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        lengths = tuple(len(array) for array in arrays)
        assert lengths and all(lengths)
        bounds = [0, *itertools.accumulate(lengths)]
        seen: list[np.ndarray] = []
        for (begin, end), prefix in zip(
            itertools.pairwise(bounds), prefixes or [None] * len(lengths), strict=True
        ):
            own = np.arange(begin, end)
            seen.append(own if prefix is None else np.concatenate([seen[prefix], own]))
        before = [np.concatenate([places[:1], places[:-1]]) for places in seen]
        is_alone = all(len(places) == length for places, length in zip(seen, lengths, strict=True))
        return cls(
            token_ids_T=torch.from_numpy(np.concatenate(arrays)),
            positions_T=_join([np.arange(len(places)) for places in seen], lengths),
            before_T=_join(before, lengths),
            bounds=torch.tensor(bounds, dtype=torch.int32),
            lengths=lengths,
            seen=None if is_alone else _seen(seen),
        )

    def to(self, device: torch.device) -> Sequences:
        """Copy to a device."""
        seen = self.seen
        return Sequences(
            self.token_ids_T.to(device),
            self.positions_T.to(device),
            self.before_T.to(device),
            self.bounds.to(device),
            self.lengths,
            seen and Seen(seen.places.to(device), seen.bounds.to(device), seen.lengths),
        )

    @property
    def seen_lengths(self) -> tuple[int, ...]:
        """Tokens that each sequence sees, its own included."""
        return self.lengths if self.seen is None else self.seen.lengths

    def equal_runs(self) -> Iterator[Run]:
        """Neighbours that attention can take together."""
        sizes = zip(self.lengths, self.seen_lengths, strict=True)
        for size, run in itertools.groupby(sizes):
            yield Run(len(list(run)), *size)


def _join(seen: Sequence[np.ndarray], lengths: Sequence[int]) -> Tensor:
    """Of what belongs to each token that a sequence sees, keep its own tokens'. Shape [T]."""
    own = [values[-length:] for values, length in zip(seen, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(own))


def _seen(seen: Sequence[np.ndarray]) -> Seen:
    lengths = tuple(len(places) for places in seen)
    bounds = [0, *itertools.accumulate(lengths)]
    return Seen(
        torch.from_numpy(np.concatenate(seen)), torch.tensor(bounds, dtype=torch.int32), lengths
    )
