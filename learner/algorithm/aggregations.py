"""Aggregations: the weight of a token in the loss of a batch, computed before the forward pass.

    loss = - sum_n w_n * objective_n

All weights divide by counts over the whole minibatch of one optimizer step, all its ranks and
microbatches: however it is cut, loss and gradient are the same. A masked token still counts.

Adding one = a function here and a line in `AGGREGATIONS`.

Shapes: E episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MinibatchSize:
    """Size of the minibatch of one optimizer step, over all ranks."""

    tokens: int
    """Tokens with loss mask 1."""
    episodes: int
    """Episodes with at least one such token."""
    max_completion_tokens: int
    """`run.max_completion_tokens`: the constant that Dr.GRPO divides by."""


Aggregation = Callable[[Int64, MinibatchSize], Float32]


def token(lengths_E: Int64, counts: MinibatchSize) -> Float32:
    """Average over all tokens: long episodes weigh more.

    Formula:
        w = 1 / tokens

    Use:
        The default; long answers are not diluted.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.3.
    """
    return np.full(len(lengths_E), 1 / max(1, counts.tokens), dtype=np.float32)


def sequence(lengths_E: Int64, counts: MinibatchSize) -> Float32:
    """Average over the tokens of each episode, then over episodes: episodes weigh alike.

    Formula:
        w = 1 / (length * episodes)

    Use:
        With GSPO and GMPO, whose papers have it; note that it favours short right answers and long
        wrong ones.

    Source:
        Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.
    """
    return (1 / (np.maximum(1, lengths_E) * max(1, counts.episodes))).astype(np.float32)


def sequence_sum(lengths_E: Int64, counts: MinibatchSize) -> Float32:
    """Add up over the tokens of each episode, then average over episodes.

    Formula:
        w = 1 / episodes

    Use:
        The unbiased policy gradient of the expected reward; its size grows with the length.

    Source:
        Williams 1992; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.
    """
    return np.full(len(lengths_E), 1 / max(1, counts.episodes), dtype=np.float32)


def dr_grpo(lengths_E: Int64, counts: MinibatchSize) -> Float32:
    """Divide by a constant length: a token weighs the same in every episode of every batch.

    Formula:
        w = 1 / (max_completion_tokens * episodes)

    Use:
        As `sequence_sum`, in the magnitude of the averages.

    Source:
        Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    return np.full(
        len(lengths_E),
        1 / (counts.max_completion_tokens * max(1, counts.episodes)),
        dtype=np.float32,
    )


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token": token,
    "sequence": sequence,
    "sequence_sum": sequence_sum,
    "dr_grpo": dr_grpo,
}
