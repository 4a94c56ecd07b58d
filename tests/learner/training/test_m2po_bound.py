"""M2PO's bound against its definition: leave out the farthest tokens, one after another."""

from __future__ import annotations

import math

import pytest
import torch

from learner.model.ranks import Ranks
from learner.training.preparation import second_moment_bound


def _left(log_rhos: list[float], advantages: list[float], most: float) -> list[float]:
    """Distances of the outward tokens that stay."""
    pairs = zip(log_rhos, advantages, strict=True)
    outward = sorted(abs(x) for x, advantage in pairs if x * advantage > 0)
    while outward and sum(x * x for x in outward) / len(outward) > most:
        outward.pop()
    return outward


@pytest.mark.parametrize("most", [0.001, 0.04, 0.3, 10.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_leaves_what_the_greedy_algorithm_leaves(
    ranks: Ranks, most: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    log_rhos = torch.randn(60, generator=random, dtype=torch.float64) * 0.7
    advantages = torch.randn(60, generator=random, dtype=torch.float64)
    moves = [(log_rhos[:25], advantages[:25]), (log_rhos[25:], advantages[25:])]

    bound = second_moment_bound(moves, most, ranks)

    pairs = zip(log_rhos.tolist(), advantages.tolist(), strict=True)
    left = sorted(abs(x) for x, advantage in pairs if x * advantage > 0 and abs(x) <= bound)
    assert left == _left(log_rhos.tolist(), advantages.tolist(), most)


def test_a_batch_within_the_moment_has_no_bound(ranks: Ranks) -> None:
    near = torch.tensor([0.1, -0.1, 0.2])

    assert second_moment_bound([(near, near)], 0.04, ranks) == math.inf


def test_tokens_that_move_against_their_advantage_do_not_count(ranks: Ranks) -> None:
    log_rhos, advantages = torch.tensor([9.0, -9.0, 0.1]), torch.tensor([-1.0, 1.0, 1.0])

    assert second_moment_bound([(log_rhos, advantages)], 0.04, ranks) == math.inf


def test_an_empty_batch_has_no_bound(ranks: Ranks) -> None:
    nothing = torch.zeros(0)

    assert second_moment_bound([(nothing, nothing)], 0.04, ranks) == math.inf
