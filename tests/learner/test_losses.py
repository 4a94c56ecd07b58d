"""The loss against its formulas in float64, and its limit cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.losses import AGGREGATIONS, CORRECTIONS, SURROGATES, Counts, policy_loss

LOG_RHOS = [0.0, 0.1, 0.3, 0.9, -0.1, -0.4, 1.5, -2.0]
ADVANTAGES = [1.0, -1.0, 1.0, -2.0, 0.5, -0.5, 1.0, -1.0]
CHOICES = list(itertools.product(CORRECTIONS, SURROGATES))


def _settings(correction: str, surrogate: str, **others: float) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(
        {"correction": correction, "surrogate": surrogate, **others}
    )


def _loss(log_rhos: Tensor, advantages: list[float], settings: AlgorithmSettings) -> Tensor:
    weights = torch.full_like(log_rhos, 1 / len(log_rhos))
    return policy_loss(
        log_rhos,
        torch.tensor(advantages, dtype=log_rhos.dtype),
        weights,
        torch.zeros_like(log_rhos),
        settings,
    )


def _expected(log_rho: float, advantage: float, settings: AlgorithmSettings) -> tuple[float, float]:
    """Objective of one token and its derivative by log pi, written out case by case."""
    rho = math.exp(log_rho)
    ratio = min(rho, settings.rho_bar) if settings.correction == "tis" else rho
    if settings.surrogate == "reinforce":
        return ratio * advantage, ratio * advantage
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    clipped = min(max(ratio, low), high)
    if ratio * advantage <= clipped * advantage:
        return ratio * advantage, ratio * advantage
    return clipped * advantage, 0.0


@pytest.mark.parametrize(("correction", "surrogate"), CHOICES)
def test_loss_and_gradient_equal_the_formula(correction: str, surrogate: str) -> None:
    settings = _settings(correction, surrogate)
    log_rhos = torch.tensor(LOG_RHOS, dtype=torch.float64, requires_grad=True)

    loss = _loss(log_rhos, ADVANTAGES, settings)
    loss.backward()

    cases = [_expected(x, a, settings) for x, a in zip(LOG_RHOS, ADVANTAGES, strict=True)]
    num = len(cases)
    assert loss.item() == pytest.approx(-sum(value for value, _ in cases) / num, abs=1e-12)
    assert log_rhos.grad is not None
    expected = [-slope / num for _, slope in cases]
    assert log_rhos.grad.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("correction", "surrogate"), CHOICES)
def test_at_pi_equal_mu_every_choice_has_the_on_policy_gradient(
    correction: str, surrogate: str
) -> None:
    log_rhos = torch.zeros(len(ADVANTAGES), dtype=torch.float64, requires_grad=True)

    _loss(log_rhos, ADVANTAGES, _settings(correction, surrogate)).backward()

    assert log_rhos.grad is not None
    expected = [-advantage / len(ADVANTAGES) for advantage in ADVANTAGES]
    assert log_rhos.grad.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
def test_an_infinite_rho_bar_is_no_truncation(surrogate: str) -> None:
    wide = _settings("tis", surrogate, rho_bar=1e9)
    log_rhos = torch.tensor(LOG_RHOS, dtype=torch.float64)

    loss = _loss(log_rhos, ADVANTAGES, wide)

    assert loss.item() == pytest.approx(
        _loss(log_rhos, ADVANTAGES, _settings("none", surrogate)).item(), abs=1e-12
    )


def test_truncation_bounds_the_gradient_that_ppo_leaves_open() -> None:
    log_rhos = torch.tensor([5.0], dtype=torch.float64, requires_grad=True)

    _loss(log_rhos, [-1.0], _settings("tis", "clip", rho_bar=2.0)).backward()

    assert log_rhos.grad is not None
    assert log_rhos.grad.item() == pytest.approx(2.0)  # exp(5) = 148 without the truncation


def test_the_expected_gradient_off_policy_is_the_on_policy_one() -> None:
    """E_mu[rho A dlog pi] = E_pi[A dlog pi], by enumeration: rho twice, or never, would fail."""
    logits = torch.tensor([0.3, -0.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    log_pi = logits.log_softmax(0)

    loss = policy_loss(
        log_pi - mu.log(), advantages, mu, torch.zeros(4), _settings("none", "reinforce")
    )

    (off_policy,) = torch.autograd.grad(loss, logits, retain_graph=True)
    on_policy_loss = -(log_pi.detach().exp() * advantages * log_pi).sum()
    (on_policy,) = torch.autograd.grad(on_policy_loss, logits)
    assert torch.allclose(off_policy, on_policy, atol=1e-12)


def test_the_entropy_bonus_pays_by_the_token_weights() -> None:
    settings = _settings("tis", "clip", entropy_bonus=0.5)
    entropies = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(2, dtype=torch.float64)

    loss = policy_loss(zeros, zeros, torch.tensor([0.25, 0.75]).double(), entropies, settings)
    loss.backward()

    assert loss.item() == pytest.approx(-0.5 * (0.25 * 1.0 + 0.75 * 3.0))
    assert entropies.grad is not None
    assert entropies.grad.tolist() == pytest.approx([-0.125, -0.375])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token", [1 / 10, 1 / 10]),
        ("sequence", [1 / (2 * 3), 1 / (5 * 3)]),
        ("dr_grpo", [1 / (8 * 3), 1 / (8 * 3)]),
    ],
)
def test_token_weights_divide_by_counts_of_the_whole_batch(
    name: str, expected: list[float]
) -> None:
    counts = Counts(tokens=10, episodes=3, max_completion_tokens=8)

    assert AGGREGATIONS[name](np.array([2, 5]), counts) == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_an_episode_without_a_trained_token_divides_by_nothing(name: str) -> None:
    counts = Counts(tokens=0, episodes=0, max_completion_tokens=8)

    assert np.isfinite(AGGREGATIONS[name](np.array([0]), counts)).all()
