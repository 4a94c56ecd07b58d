"""A bandit of five arms, small enough that every expectation is a sum of five terms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.losses import policy_loss
from tests.learner.support.made_tokens import make_prepared

LOGITS = torch.tensor([0.9, 0.4, -0.3, -1.0, 0.1], dtype=torch.float64)
"""Of the target policy pi."""
MU = torch.tensor([0.05, 0.3, 0.25, 0.3, 0.1], dtype=torch.float64)
"""The behaviour policy; pi/mu is 8 at the first arm, and less than 0.4 at the fourth."""
ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, 2.0, -1.0], dtype=torch.float64)

PI = LOGITS.softmax(0)
RHOS = PI / MU
SCORES = torch.eye(5, dtype=torch.float64) - PI
"""Row a: the gradient of log pi(a) by the logits."""
TRUE_GRADIENT = (PI * ADVANTAGES) @ SCORES
"""Of E_pi[A]."""


class Moments(NamedTuple):
    """Exact moments of the gradient estimate of one sample. Shape [5], by the logits."""

    mean: Tensor
    variance: Tensor
    fourth: Tensor
    """About the mean."""


def moments(factors: Tensor) -> Moments:
    """Sum over the arms; an arm's estimate is factor x advantage x score."""
    estimates = (factors * ADVANTAGES)[:, None] * SCORES
    mean = MU @ estimates
    return Moments(mean, MU @ (estimates - mean) ** 2, MU @ (estimates - mean) ** 4)


def expected_gradient(settings: AlgorithmSettings) -> Tensor:
    """Ask the loss itself: every arm once, weighted by its probability under mu."""
    return gradient(torch.arange(5), MU, settings)


def sampled_gradient(num_samples: int, settings: AlgorithmSettings, *, seed: int) -> Tensor:
    """Ask the loss for a batch of arms drawn from mu."""
    random = torch.Generator().manual_seed(seed)
    arms_N = torch.multinomial(MU, num_samples, replacement=True, generator=random)
    weights_N = torch.full((num_samples,), 1 / num_samples, dtype=torch.float64)
    return gradient(arms_N, weights_N, settings)


def gradient(
    arms_N: Tensor,
    weights_N: Tensor,
    settings: AlgorithmSettings,
    *,
    mu: Tensor = MU,
    advantages: Tensor = ADVANTAGES,
) -> Tensor:
    """Differentiate the objective of these arms by the logits."""
    logits = LOGITS.clone().requires_grad_()
    prepared = make_prepared(mu.log()[arms_N], advantages[arms_N], weights_N)
    log_pi_N = logits.log_softmax(0)[arms_N]
    loss = policy_loss(log_pi_N, torch.zeros_like(weights_N), prepared, settings).loss
    (found,) = torch.autograd.grad(-loss, logits)
    return found
