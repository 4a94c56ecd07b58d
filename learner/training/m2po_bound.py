"""M2PO's bound on |log(pi/mu)| for the tokens of one optimizer step.

Computed before each optimizer step, over the tokens of its minibatch on all ranks and under the
present policy: a bound from the batch's beginning would miss the effect of the steps before. It
costs a forward pass.

Source:
    Zheng et al. 2025, arXiv:2510.01161.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from learner.algorithm.microbatch import Prepared
from learner.model.policy import Policy
from learner.model.ranks import Ranks

from .preparation import score

# Halvings of the interval: beyond that float64 has no more digits.
HALVINGS = 64


def bound_ratios(
    policy: Policy, minibatch: Sequence[Prepared], most: float, ranks: Ranks
) -> list[Prepared]:
    """Bound the ratios of the next optimizer step; every rank must call it.

    Args:
        policy: The present one.
        minibatch: This rank's share of the step's tokens.
        most: Largest mean of log(rho)^2, nats^2.
        ranks: All of them.
    """
    moves = [
        (
            score(policy, each.microbatch).logprobs_N - each.microbatch.behaviour_logprobs_N,
            each.microbatch.advantages_N,
        )
        for each in minibatch
    ]
    bound = second_moment_bound(moves, most, ranks)
    return [replace(each, log_ratio_bound=bound) for each in minibatch]


def second_moment_bound(moves: Sequence[tuple[Tensor, Tensor]], most: float, ranks: Ranks) -> float:
    """Find the largest bound under which the remaining second moment is at most `most`.

    Only tokens that move out in their advantage's direction (A log(rho) > 0) are counted and
    masked. Leaving out the farthest of them lowers the mean of log(rho)^2 of the rest, so the mean
    ascends with the bound, and halving finds it without gathering the batch on one rank.

    Args:
        moves: log(pi/mu), nats, and advantages of each microbatch's tokens. Shapes [N].
        most: Largest mean of log(rho)^2, nats^2.
        ranks: All of them call this.

    Returns:
        Largest |log(rho)| that stays, nats; infinite if all may.
    """
    outward = [x_N[x_N * advantages_N > 0].double().abs() for x_N, advantages_N in moves]
    # The zero changes no compared mean, and gives an empty batch a maximum.
    distances_M = torch.cat([torch.zeros(1, dtype=torch.float64, device=ranks.device), *outward])
    widest = float(ranks.maximum(distances_M.max()))

    def mean_within(bound: float) -> float:
        inside_M = distances_M[1:][distances_M[1:] <= bound]
        counted = torch.stack([inside_M.square().sum(), inside_M.new_tensor(len(inside_M))])
        total, num = ranks.sum(counted).tolist()
        return float(total / num) if num else 0.0

    if mean_within(widest) <= most:
        return math.inf
    low, high = 0.0, widest
    for _halving in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_within(middle) <= most else (low, middle)
    return low
