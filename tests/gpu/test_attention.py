"""Packed attention on a card: torch's kernel for different lengths against its definition."""

from __future__ import annotations

import pytest
import torch

from learner.algorithm.microbatch import Sequences
from learner.model.attention import attend

pytestmark = pytest.mark.gpu
ROWS = [range(70), range(3), range(129), range(40), range(1)]
PREFIXES = [None, None, None, 2, 2]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("shared_prompts", [False, True])
def test_the_kernel_for_different_lengths_is_attention_by_its_definition(
    window: int | None, *, shared_prompts: bool
) -> None:
    sequences = Sequences.from_token_ids(ROWS, prefixes=PREFIXES if shared_prompts else None)
    tokens = len(sequences.token_ids_T)
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, 64) for heads in (4, 2, 2)]
    wide = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    narrow = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in wide]
    module = torch.nn.Identity()

    (q, k, v), (q16, k16, v16), there = wide, narrow, sequences.to(torch.device("cuda"))
    expected, _ = attend(module, q, k, v, None, sequences=sequences, sliding_window=window)
    found, _ = attend(module, q16, k16, v16, None, sequences=there, sliding_window=window)
    expected.square().sum().backward()
    found.float().square().sum().backward()

    assert float((found.cpu() - expected).abs().max()) < 0.03
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        difference = (ours.grad.cpu() - theirs.grad).abs().max()
        assert float(difference) < 0.03 * float(theirs.grad.abs().max())
