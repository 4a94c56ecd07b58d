"""Fused layers on a card against those of transformers, and one rank against FSDP2."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.algorithm.microbatch import Sequences
from learner.model import policy as policies
from learner.model.compilers import has_kernels
from learner.model.policy import Policy, release, shard
from learner.model.ranks import Ranks
from tests.learner.support.random_models import ARCHITECTURES, make_random_model
from tests.learner.support.ranks.forced_shards import forced_shards

pytestmark = pytest.mark.gpu
ROWS = {
    "of different lengths": Sequences.from_token_ids(
        [range(3, 8), range(4, 34), range(9, 10), range(6, 23)]
    ),
    "with a shared prompt": Sequences.from_token_ids(
        [range(3, 12), range(4, 16)], prefixes=[None, 0]
    ),
    "of one length": Sequences.from_token_ids([range(3, 27), range(5, 29), range(9, 33)]),
}


def _found(card: Ranks, family: str, rows: str, dtype: torch.dtype) -> list[Tensor]:
    """Log-probs and gradients of a random model."""
    causal_lm = make_random_model(family, initializer_range=0.05).to("cuda")
    policy = shard(Policy(causal_lm, temperature=1.0).eval(), card.mesh, dtype=dtype)
    sequences = ROWS[rows].to(card.device)
    places_T = torch.arange(len(sequences.token_ids_T), device="cuda")
    indices_N = places_T[sequences.before_T != places_T]
    logprobs_N = policy(sequences, indices_N).logprobs_N
    (logprobs_N * torch.linspace(-1, 1, len(indices_N), device="cuda")).sum().backward()
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    release(policy)
    return [logprobs_N.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)]


def _plain() -> Any:
    return mock.patch.multiple(policies, fuse_layers=mock.DEFAULT, has_kernels=lambda _: False)


def _apart() -> Any:
    """Products of the same states stay apart, as with FSDP2."""
    return mock.patch.object(policies, "has_kernels", return_value=False)


def _largest(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", [f for f in ARCHITECTURES if not f.startswith("cohere")])
def test_fused_layers_are_those_of_transformers(card: Ranks, family: str, rows: str) -> None:
    assert has_kernels("cuda"), "a C compiler, and Python's headers, are there"
    with _plain():
        exact, rounded = (_found(card, family, rows, d) for d in (torch.float32, torch.bfloat16))

    wide = _found(card, family, rows, torch.float32)
    narrow = _found(card, family, rows, torch.bfloat16)

    assert _largest(wide, exact) < 1e-5
    assert _largest(narrow, exact) < 1.5 * _largest(rounded, exact), "as near as plain ones"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", ["qwen3", "olmo2", "cohere"])
def test_one_rank_is_fsdp_to_the_bit(card: Ranks, family: str, rows: str) -> None:
    with forced_shards():
        expected = _found(card, family, rows, torch.bfloat16)

    with _apart():
        found = _found(card, family, rows, torch.bfloat16)

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
