"""One rank of two that have a part of the vocabulary each, and score by the interpreted kernels.

For `test_logit_kernels.py`. Argument: folder for the findings.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, distributed, nn

from configs.architecture import LogitChange
from configs.settings import ParallelSettings
from learner.model import logits
from learner.model.logits import Softmax, VocabularyPart
from learner.model.output_layer import score_tokens
from learner.model.ranks import join
from tests.learner.support.fresh_kernels import LOGITS, fresh_kernels

TOKENS, WIDTH, VOCABULARY = 6, 8, 37
FIRST = 20
"""The second rank's first token."""


def whole() -> nn.Linear:
    """Make the layer whose rows are divided."""
    torch.manual_seed(3)
    return nn.Linear(WIDTH, VOCABULARY, bias=False)


def scored(layer: nn.Linear, part: VocabularyPart) -> list[Tensor]:
    """Loss, log-probs and entropies; gradients of states and weight."""
    torch.manual_seed(4)
    states_ND = (4 * torch.randn(TOKENS, WIDTH)).requires_grad_()
    targets_N = torch.tensor([0, FIRST - 1, FIRST, VOCABULARY - 1, 5, 30])
    found = score_tokens(
        layer,
        states_ND,
        targets_N,
        Softmax(LogitChange(cap=3.0), 0.8),
        entropy_gradient=True,
        part=part,
        loss_of=lambda _rows, logprobs_R, entropies_R: (logprobs_R.exp() + entropies_R).sum(),
    )
    assert found.loss is not None
    gradients = torch.autograd.grad(found.loss, [states_ND, layer.weight])
    return [found.loss.detach(), found.logprobs_N, found.entropies_N, *gradients]


def main(folder: Path) -> None:
    """Score, and write down what was found."""
    ranks = join("cpu", threads=1, parallel=ParallelSettings(tensor=2))
    own = slice(0, FIRST) if ranks.rank == 0 else slice(FIRST, VOCABULARY)
    layer = whole()
    layer.weight = nn.Parameter(layer.weight.detach()[own])
    with (
        fresh_kernels(LOGITS, interpreted=True) as kernels,
        mock.patch.object(logits, "kernels_for", return_value=kernels) as chosen,
    ):
        found = scored(layer, VocabularyPart(own.start, distributed.group.WORLD))
    assert chosen.called
    torch.save(found, folder / f"found-{ranks.rank}.pt")
    ranks.barrier()
    ranks.destroy_process_group()
