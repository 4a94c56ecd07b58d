"""Whitening of advantages over the microbatches of all ranks."""

from __future__ import annotations

import torch

from learner.model.ranks import Ranks
from learner.training.preparation import whiten


def test_whitening_is_over_all_tokens_together(ranks: Ranks) -> None:
    torch.manual_seed(1)
    parts = [torch.randn(n) * 3 + 5 for n in (4, 0, 9)]

    whitened = whiten(parts, ranks)

    together = torch.cat(parts)
    expected = (together - together.mean()) / together.std(correction=0)
    assert [len(part) for part in whitened] == [4, 0, 9]
    assert torch.allclose(torch.cat(whitened), expected, atol=1e-3)


def test_equal_advantages_are_whitened_to_zeros(ranks: Ranks) -> None:
    (whitened,) = whiten([torch.full((5,), 0.3)], ranks)

    assert whitened.abs().max() < 1e-3
