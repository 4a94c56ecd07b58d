"""Random numbers of sampling: an engine's own, or those that belong to a token's place.

Numbers that belong to a place are the same in every process, whatever was drawn before: an episode
that another actor continues goes on as it would have.

Shapes: R rows in use, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A token to be sampled."""

    stream: tuple[int, int]
    """Seed and task."""
    position: int
    """Tokens before it, those of the prompt included."""


def own_draws(like_RV: Tensor, generator: torch.Generator) -> Tensor:
    """Draw log E, E exponential, from an engine's own generator. Shape [R, V]."""
    return torch.empty_like(like_RV).exponential_(generator=generator).log_()


def draws_of_places(places: Sequence[TokenPlace], like_RV: Tensor) -> Tensor:
    """Make the log E that belong to these places. Shape [R, V].

    Philox is a function of key and counter (Salmon et al. 2011, "Parallel random numbers: as easy
    as 1, 2, 3"): the key is the stream, and each position has 2^64 counts of its own.
    """
    rows = [_exponentials(place, like_RV.shape[1]) for place in places]
    return torch.from_numpy(np.log(np.stack(rows))).to(like_RV)


def _exponentials(place: TokenPlace, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    # In float64: among as many float32 as a vocabulary has, one in fifty tokens would meet a zero.
    bits = np.random.Philox(key=list(place.stream), counter=[0, place.position, 0, 0])
    return np.random.Generator(bits).standard_exponential(count)
