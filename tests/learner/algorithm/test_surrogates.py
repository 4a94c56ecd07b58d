"""Surrogates of whole episodes against their papers, and limit cases of the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.losses import PolicyLoss, policy_loss
from tests.learner.support.made_tokens import make_prepared

LENGTHS = (2, 3, 1)
LOG_RHOS = torch.tensor([0.7, -0.02, -0.6, 0.05, -0.7, 0.1], dtype=torch.float64)
ADVANTAGES = (1.0, -2.0, 0.5)
WEIGHTS = tuple(1 / (length * len(LENGTHS)) for length in LENGTHS)
Episodes = tuple[Tensor, ...]


def _settings(surrogate: str, **others: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(
        {"correction": "none", "surrogate": surrogate, **others}
    )


def _spread(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))


def _differentiate(
    settings: AlgorithmSettings, log_rhos_N: Tensor = LOG_RHOS
) -> tuple[PolicyLoss, Tensor]:
    """Loss about mu, averaged over tokens and then over episodes."""
    log_pi_N = log_rhos_N.clone().requires_grad_()
    prepared = make_prepared(
        torch.zeros(6).double(), _spread(ADVANTAGES), _spread(WEIGHTS), lengths=LENGTHS
    )
    found = policy_loss(log_pi_N, torch.zeros(6), prepared, settings)
    (gradient_N,) = torch.autograd.grad(found.loss, log_pi_N)
    return found, gradient_N


def _gspo(episodes: Episodes) -> Tensor:
    """Mean over episodes of min(s A, clip(s) A), s the geometric mean ratio: a whole gradient."""
    objectives = []
    for log_ratios, advantage in zip(episodes, ADVANTAGES, strict=True):
        s = log_ratios.mean().exp()
        objectives.append(torch.minimum(s * advantage, s.clamp(1 - 0.3, 1 + 0.2) * advantage))
    return torch.stack(objectives).mean()


def _gmpo(episodes: Episodes) -> Tensor:
    """Mean over episodes of A times the geometric mean of one-sidedly clipped ratios."""
    objectives = []
    for log_ratios, advantage in zip(episodes, ADVANTAGES, strict=True):
        ratios = log_ratios.exp()
        clipped = (
            ratios.clamp(max=math.exp(0.2)) if advantage > 0 else ratios.clamp(min=math.exp(-0.3))
        )
        objectives.append(clipped.prod() ** (1 / len(ratios)) * advantage)
    return torch.stack(objectives).mean()


@pytest.mark.parametrize(("surrogate", "objective"), [("gspo", _gspo), ("gmpo", _gmpo)])
def test_token_by_token_is_the_gradient_of_the_whole_episode(
    surrogate: str, objective: Callable[[Episodes], Tensor]
) -> None:
    log_pi_N = LOG_RHOS.clone().requires_grad_()
    whole = objective(log_pi_N.split(LENGTHS))
    (expected_N,) = torch.autograd.grad(-whole, log_pi_N)

    found, gradient_N = _differentiate(_settings(surrogate, clip_low=0.3, clip_high=0.2))

    assert found.loss.item() == pytest.approx(-whole.item(), abs=1e-12)
    assert torch.allclose(gradient_N, expected_N, atol=1e-12)
    assert found.low_N.any() and found.high_N.any()
    assert (gradient_N == 0).any() and (gradient_N != 0).any()


@pytest.mark.parametrize("surrogate", ["clip", "gspo", "cispo"])
def test_a_trust_region_without_bounds_is_its_ratio_alone(surrogate: str) -> None:
    _, gradient_N = _differentiate(_settings(surrogate, clip_low=1.0, clip_high=1e9))

    mean = [0.34, 0.34, *[-1.25 / 3] * 3, 0.1]
    logs = torch.tensor(mean).double() if surrogate == "gspo" else LOG_RHOS
    assert torch.allclose(gradient_N, -_spread(WEIGHTS) * logs.exp() * _spread(ADVANTAGES))


@pytest.mark.parametrize("surrogate", ["m2po", "dppo_tv", "dppo_kl"])
def test_a_mask_without_bounds_is_reinforce(surrogate: str) -> None:
    settings = _settings(surrogate, clip_low=1.0, clip_high=1e9, second_moment=1e9)

    near = 0.3 * LOG_RHOS - 0.3  # mu is certain, so nothing is more probable under pi

    found, gradient_N = _differentiate(settings, near)
    plain, plain_gradient_N = _differentiate(_settings("reinforce"), near)

    assert found.loss.item() == plain.loss.item()
    assert torch.equal(gradient_N, plain_gradient_N)


def test_dual_clip_at_infinity_is_clip_and_bounds_what_clip_leaves_open() -> None:
    far = LOG_RHOS + torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0, 0.0])

    plain, plain_gradient_N = _differentiate(_settings("clip"), far)
    infinite, infinite_gradient_N = _differentiate(_settings("clip", dual_clip=1e12), far)
    dual, gradient_N = _differentiate(_settings("clip", dual_clip=3.0), far)

    assert infinite.loss.item() == plain.loss.item()
    assert torch.equal(infinite_gradient_N, plain_gradient_N)
    assert plain_gradient_N[2] > 1 and gradient_N[2] == 0
    assert torch.equal(gradient_N[3:], plain_gradient_N[3:])
    assert dual.high_N.tolist() == [True, False, True, False, False, False]


def test_truncation_bounds_the_gradient_that_ppo_leaves_open() -> None:
    far = LOG_RHOS + torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0])

    _, gradient_N = _differentiate(_settings("clip", correction="tis", rho_bar=2.0), far)

    assert gradient_N[2].item() == pytest.approx(2.0 * 2.0 * WEIGHTS[1])


def test_topr_leaves_good_episodes_alone_and_tapers_bad_ones() -> None:
    log_rhos = torch.tensor([-5.0, -5.0, -0.5, 0.1, 0.1, 9.0]).double()

    _, gradient_N = _differentiate(_settings("topr"), log_rhos)

    factors = torch.tensor([1, 1, *[math.exp(-0.3)] * 3, 1]).double()
    assert torch.allclose(gradient_N, -_spread(WEIGHTS) * factors * _spread(ADVANTAGES))


def test_dppo_lets_a_rare_token_change_its_ratio_and_a_frequent_one_not() -> None:
    log_mu, log_pi = torch.tensor([0.001, 0.5]).log(), torch.tensor([0.01, 0.8]).log()
    prepared = make_prepared(log_mu, torch.ones(2), torch.ones(2))

    tv = policy_loss(log_pi, torch.zeros(2), prepared, _settings("dppo_tv"))
    clip = policy_loss(log_pi, torch.zeros(2), prepared, _settings("clip"))

    assert tv.high_N.tolist() == [False, True]
    assert clip.high_N.tolist() == [True, True]


@pytest.mark.parametrize(
    "surrogate", ["dppo_tv", "dppo_kl", "m2po", "gspo", "gmpo", "topr", "clip"]
)
def test_probabilities_of_zero_and_one_give_no_nan(surrogate: str) -> None:
    log_mu, log_pi = torch.tensor([0.0, -60.0, -1e-9]), torch.tensor([-60.0, 0.0, 0.0])
    log_pi.requires_grad_()
    settings = _settings(surrogate, correction="none" if surrogate == "topr" else "tis")
    prepared = make_prepared(
        log_mu, torch.tensor([1.0, -1.0, 1.0]), torch.ones(3), log_ratio_bound=1.0
    )

    policy_loss(log_pi, torch.zeros(3), prepared, settings).loss.backward()

    assert log_pi.grad is not None and log_pi.grad.isfinite().all()
