"""Demonstrations of random tokens, and their loss as transformers computes it row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from buffer.record.demonstrations import Demonstrations, DemonstrationsWriter
from tests.learner.support.tiny_policy import VOCABULARY


def write_demonstrations(
    folder: Path,
    number: int,
    *,
    held_out: int = 0,
    seed: int = 0,
    longest: int = 12,
    vocabulary: int = VOCABULARY,
) -> Demonstrations:
    """Write rows of 2 to `longest` tokens, of which the later ones are trained, with gaps."""
    random, writer = np.random.default_rng(seed), DemonstrationsWriter()
    for row in range(number + held_out):
        token_ids = random.integers(2, vocabulary, random.integers(2, longest + 1)).tolist()
        is_trained = (random.random(len(token_ids)) < 0.7).tolist()
        is_trained[-1] = True
        writer.add(token_ids, is_trained, is_held_out=row >= number)
    folder.mkdir(exist_ok=True, parents=True)
    writer.write(folder)
    return Demonstrations.read(folder)


def loss_row_by_row(causal_lm: PreTrainedModel, rows: Demonstrations, numbers: list[int]) -> Tensor:
    """Mean cross entropy of the trained tokens of these rows, each in a pass of its own."""
    losses, trained = [], 0
    for token_ids, is_trained in (rows[number] for number in numbers):
        logits_TV = causal_lm(torch.tensor(token_ids[None].astype(np.int64))).logits[0]
        targets_T = torch.tensor(token_ids[1:].astype(np.int64))
        loss_T = functional.cross_entropy(logits_TV[:-1], targets_T, reduction="none")
        losses.append(loss_T[torch.tensor(is_trained[1:])].sum())
        trained += int(is_trained[1:].sum())
    return torch.stack(losses).sum() / trained
