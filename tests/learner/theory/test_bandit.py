"""Bias and variance of the corrections on a bandit, against sums over its arms."""

from __future__ import annotations

import pytest
import torch

from configs.settings import AlgorithmSettings
from tests.learner.theory.bandit import (
    ADVANTAGES,
    MU,
    PI,
    RHOS,
    SCORES,
    TRUE_GRADIENT,
    expected_gradient,
    gradient,
    moments,
    sampled_gradient,
)

SIGMAS = 5.0  # at fixed seeds: a wrong estimator is further off, chance would need millions of runs
EXACT = 1e-12
RHO_BAR = 2.0

PLAIN = AlgorithmSettings(correction="none", surrogate="reinforce")
TRUNCATED = AlgorithmSettings(correction="tis", surrogate="reinforce", rho_bar=RHO_BAR)
TRUNCATED_RHOS = RHOS.clamp(max=RHO_BAR)


def test_plain_importance_sampling_has_no_bias():
    assert torch.allclose(expected_gradient(PLAIN), TRUE_GRADIENT, atol=EXACT, rtol=0)


def test_the_bias_of_truncation_is_what_it_cuts_off():
    """The excess (rho - rho_bar)+ of each arm, times what that arm would have taught."""
    excess = (RHOS - RHO_BAR).clamp(min=0)

    bias = expected_gradient(TRUNCATED) - TRUE_GRADIENT

    assert torch.allclose(bias, -(MU * excess * ADVANTAGES) @ SCORES, atol=EXACT, rtol=0)
    assert bias.abs().max() > 0.1  # of this bandit; it is there to be seen


def test_the_bias_of_truncation_is_gone_once_no_ratio_is_larger():
    wide = TRUNCATED.model_copy(update={"rho_bar": float(RHOS.max())})

    assert torch.allclose(expected_gradient(wide), TRUE_GRADIENT, atol=EXACT, rtol=0)


def test_the_bias_of_masking_is_what_it_leaves_out():
    masked = AlgorithmSettings(
        correction="mis", surrogate="reinforce", mask_low=0.6, mask_high=RHO_BAR
    )
    is_out = (RHOS < 0.6) | (RHOS > RHO_BAR)

    bias = expected_gradient(masked) - TRUE_GRADIENT

    assert torch.allclose(bias, -(MU * RHOS * is_out * ADVANTAGES) @ SCORES, atol=EXACT, rtol=0)
    assert 0 < is_out.sum() < 5


def test_a_wrong_baseline_cancels_unless_ratios_are_truncated():
    """E_mu[u dlog(pi)] is 0 for u = rho alone: a critic that is off by 1 moves truncated ones."""
    off_by_one = torch.ones(5, dtype=torch.float64)

    plain, truncated = (
        gradient(torch.arange(5), MU, settings, advantages=off_by_one)
        for settings in (PLAIN, TRUNCATED)
    )

    assert torch.allclose(plain, torch.zeros(5, dtype=torch.float64), atol=EXACT, rtol=0)
    assert torch.allclose(truncated, (MU * TRUNCATED_RHOS) @ SCORES, atol=EXACT, rtol=0)
    assert truncated.abs().max() > 0.1


def test_ignoring_mu_follows_the_objective_of_another_policy():
    """What the gradient is of when every sample is taken for one of pi: E_mu[A], not E_pi[A]."""
    ignoring = moments(torch.ones(5, dtype=torch.float64)).mean

    assert torch.allclose(ignoring, (MU * ADVANTAGES) @ SCORES, atol=EXACT, rtol=0)
    assert torch.nn.functional.cosine_similarity(ignoring, TRUE_GRADIENT, dim=0) < 0.5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("settings", "factors"), [(PLAIN, RHOS), (TRUNCATED, TRUNCATED_RHOS)], ids=["none", "tis"]
)
def test_a_sampled_gradient_is_within_its_standard_error_of_the_mean(settings, factors, seed):
    num_samples = 20_000
    exact = moments(factors)

    found = sampled_gradient(num_samples, settings, seed=seed)

    errors = (found - exact.mean).abs() / (exact.variance / num_samples).sqrt()
    assert errors.max() < SIGMAS


def test_samples_show_the_bias_of_truncation():
    """With so many samples the truth is out of reach of the standard error."""
    num_samples = 20_000
    exact = moments(TRUNCATED_RHOS)

    found = sampled_gradient(num_samples, TRUNCATED, seed=0)

    errors = (found - TRUE_GRADIENT).abs() / (exact.variance / num_samples).sqrt()
    assert errors.max() > 2 * SIGMAS


@pytest.mark.parametrize(
    ("settings", "factors"), [(PLAIN, RHOS), (TRUNCATED, TRUNCATED_RHOS)], ids=["none", "tis"]
)
def test_the_variance_over_batches_is_that_of_the_second_moment(settings, factors):
    num_batches, size = 2000, 4
    exact = moments(factors)
    # Of a mean of `size` samples; the fourth moment gives the standard error of a sample variance.
    variance = exact.variance / size
    fourth = (exact.fourth + 3 * (size - 1) * exact.variance**2) / size**3
    standard_error = ((fourth - variance**2) / num_batches).sqrt()

    found = torch.stack(
        [sampled_gradient(size, settings, seed=seed) for seed in range(num_batches)]
    )

    assert ((found.var(0) - variance).abs() / standard_error).max() < SIGMAS


def test_the_second_moment_of_plain_importance_sampling_is_that_of_pi_times_rho():
    """E_mu[rho^2 f^2] = E_pi[rho f^2]: where pi/mu is large, variance is."""
    exact = moments(RHOS)

    second = (PI * RHOS * ADVANTAGES**2) @ SCORES**2

    assert torch.allclose(exact.variance, second - TRUE_GRADIENT**2, atol=EXACT, rtol=0)


def test_truncation_is_nearer_to_the_truth_until_samples_are_many():
    """Bias squared + variance / n: truncation wins at small n, and loses for sure at large n."""
    plain, truncated = moments(RHOS), moments(TRUNCATED_RHOS)
    bias_squared = ((truncated.mean - TRUE_GRADIENT) ** 2).sum()
    saved = (plain.variance - truncated.variance).sum()

    even = float(saved / bias_squared)

    assert even > 1
    for num_samples, is_nearer in ((even / 2, True), (even * 2, False)):
        error = bias_squared + truncated.variance.sum() / num_samples
        assert (error < plain.variance.sum() / num_samples) == is_nearer


def test_the_clip_silences_arms_that_have_left_in_the_direction_of_their_advantage():
    settings = AlgorithmSettings(correction="none", surrogate="clip", clip_low=0.2, clip_high=0.28)
    has_left = torch.where(ADVANTAGES > 0, RHOS > 1.28, RHOS < 0.8)

    found = expected_gradient(settings)

    heard = (MU * RHOS * ADVANTAGES * ~has_left) @ SCORES
    assert 0 < has_left.sum() < 5
    assert torch.allclose(found, heard, atol=EXACT, rtol=0)


@pytest.mark.parametrize("surrogate", ["reinforce", "clip"])
@pytest.mark.parametrize("correction", ["none", "tis"])
def test_at_pi_equal_mu_every_estimator_is_the_on_policy_one(correction, surrogate):
    settings = AlgorithmSettings.model_validate({"correction": correction, "surrogate": surrogate})

    found = gradient(torch.arange(5), PI, settings, mu=PI)

    assert torch.allclose(found, TRUE_GRADIENT, atol=EXACT, rtol=0)
