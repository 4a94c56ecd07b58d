"""Divergence of V-trace off-policy: the values of a coarse critic chase themselves.

    0 --any action, reward 0--> 1 --any action, reward 1--> end        values w and 2w

Every return is 1, under any policy. In state 0 both policies agree; in state 1 they share the
probability `overlap` = sum over actions of min(mu, pi), which is all that ties 2w to the reward,
while w is drawn after 2w at full weight. The expected gradient step is

    dw = (w + overlap (1 - 2w)) + 2 overlap (1 - 2w) = w (1 - 6 overlap) + 3 overlap
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learner.algorithm.token_advantages import gae
from learner.algorithm.vtrace import vtrace

FEATURES_T = torch.tensor([1.0, 2.0], dtype=torch.float64)
REWARDS_TB = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
DISCOUNTS_TB = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
NOTHING_B = torch.zeros(2, dtype=torch.float64)
STEPS, RATE = 400, 0.1
LEAST_SQUARES = 3 / 5  # of w = 1 and 2w = 1


def _policies(overlap: float) -> tuple[Tensor, Tensor]:
    """Mu and pi over the two actions of state 1."""
    mu_B = torch.tensor([1 - overlap / 2, overlap / 2], dtype=torch.float64)
    return mu_B, mu_B.flip(0)


def _learn(overlap: float, *, by_vtrace: bool) -> list[float]:
    """Follow the expected gradient of the value loss under mu, from w = 0."""
    mu_B, pi_B = _policies(overlap)
    log_rhos_TB = torch.stack([torch.zeros_like(mu_B), (pi_B / mu_B).log()])
    weights = [0.0]
    for _ in range(STEPS):
        values_TB = (FEATURES_T * weights[-1])[:, None].expand(2, 2)
        given = REWARDS_TB, DISCOUNTS_TB, values_TB, NOTHING_B
        targets_TB = vtrace(log_rhos_TB, *given).vs if by_vtrace else gae(*given, lam=1.0).targets
        step = FEATURES_T @ ((targets_TB - values_TB) @ mu_B)
        weights.append(weights[-1] + RATE * float(step))
    return weights


@pytest.mark.parametrize("overlap", [0.05, 0.1, 0.15])
def test_values_outgrow_every_return_where_the_policies_hardly_overlap(overlap: float) -> None:
    weights = _learn(overlap, by_vtrace=True)

    assert weights[1] == pytest.approx(RATE * 3 * overlap)
    assert weights[2] == pytest.approx(weights[1] * (1 + RATE * (1 - 6 * overlap)) + weights[1])
    assert weights[-1] > 10, "no return is above 1"


@pytest.mark.parametrize("overlap", [0.4, 1.0])
def test_values_settle_where_they_overlap_enough(overlap: float) -> None:
    weights = _learn(overlap, by_vtrace=True)

    assert weights[-1] == pytest.approx(3 * overlap / (6 * overlap - 1), abs=1e-6)


def test_on_policy_they_settle_at_the_least_squares() -> None:
    assert _learn(1.0, by_vtrace=True)[-1] == pytest.approx(LEAST_SQUARES, abs=1e-9)


def test_whole_returns_chase_nothing_whatever_the_overlap() -> None:
    assert _learn(0.05, by_vtrace=False)[-1] == pytest.approx(LEAST_SQUARES, abs=1e-9)
