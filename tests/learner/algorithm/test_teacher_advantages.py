"""The advantage of a teacher: its expected gradient against finite differences of the exact KL.

A policy in a table: a row of logits for each prefix, so that all sequences can be listed, and every
expectation is a sum over them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.losses import policy_loss
from learner.algorithm.microbatch import PreparedMicrobatch, empty_microbatch
from learner.algorithm.token_advantages import teacher_advantages

TOKENS, LENGTH = 3, 3
PREFIXES = [p for n in range(LENGTH) for p in itertools.product(range(TOKENS), repeat=n)]
SEQUENCES = list(itertools.product(range(TOKENS), repeat=LENGTH))
PLACES = torch.tensor([[PREFIXES.index(s[:t]) for t in range(LENGTH)] for s in SEQUENCES])
DRAWN = torch.tensor(SEQUENCES)
STEP = 1e-5
PLAIN = {"correction": "none", "surrogate": "reinforce"}


def table(seed: int) -> Tensor:
    """Draw logits for each prefix. Shape [prefixes, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(PREFIXES), TOKENS, generator=generator, dtype=torch.float64)


LOG_TEACHER, LOG_MU = table(1).log_softmax(-1), table(2).log_softmax(-1)


def exact_kl(logits: Tensor, log_sampler: Tensor) -> float:
    """Sum over steps KL(pi || teacher) of the next token, in the states of a sampler."""
    log_pi = logits.log_softmax(-1)
    by_state = (log_pi.exp() * (log_pi - LOG_TEACHER)).sum(-1)
    total = 0.0
    for number, prefix in enumerate(PREFIXES):
        reached = sum(
            float(log_sampler[PREFIXES.index(prefix[:t]), prefix[t]]) for t in range(len(prefix))
        )
        total += float(torch.tensor(reached).exp() * by_state[number])
    return total


def slopes_of_kl(logits: Tensor, log_sampler: Tensor) -> Tensor:
    """Differentiate `exact_kl` by central differences; the states stay those of the sampler."""
    slopes = torch.zeros_like(logits)
    for place in itertools.product(*map(range, logits.shape)):
        ends = []
        for sign in (1, -1):
            moved = logits.clone()
            moved[place] += sign * STEP
            ends.append(exact_kl(moved, log_sampler))
        slopes[place] = (ends[0] - ends[1]) / (2 * STEP)
    return slopes


def expected_gradient(
    logits: Tensor, log_mu: Tensor, names: dict[str, Any], *, weight: float = 1.0
) -> Tensor:
    """Differentiate the loss of all sequences, each weighed with its probability under mu."""
    settings = AlgorithmSettings.model_validate(
        {"advantage": "none", "teacher": "t", "rho_bar": 1e6, "teacher_weight": weight, **names}
    )
    moving = logits.clone().requires_grad_()
    log_pi_N, mu_N, teacher_N = (
        values[PLACES, DRAWN].flatten() for values in (moving.log_softmax(-1), log_mu, LOG_TEACHER)
    )
    probabilities_E = log_mu[PLACES, DRAWN].sum(-1).exp()
    microbatch = replace(
        empty_microbatch(),
        behaviour_logprobs_N=mu_N,
        advantages_N=teacher_advantages(log_pi_N.detach(), teacher_N, settings.teacher_weight),
        weights_N=probabilities_E.repeat_interleave(LENGTH),
        lags_N=torch.ones(len(mu_N), dtype=torch.int64),
        episodes_N=torch.arange(len(SEQUENCES)).repeat_interleave(LENGTH),
        rewards_B=torch.zeros(len(SEQUENCES), dtype=torch.float64),
    )
    prepared = PreparedMicrobatch(microbatch, log_prox_N=log_pi_N.detach(), log_teacher_N=teacher_N)
    loss = policy_loss(log_pi_N, torch.zeros_like(mu_N), prepared, settings).loss
    (gradient,) = torch.autograd.grad(loss, moving)
    return gradient


@pytest.mark.parametrize(
    "names",
    [
        PLAIN,
        {"correction": "tis", "surrogate": "reinforce"},
        {"correction": "tis", "surrogate": "clip", "proximal": "recomputed"},
        {"correction": "tis", "surrogate": "reinforce", "proximal": "interpolated"},
        {"correction": "none", "surrogate": "clip", "clip_low": 1.0, "clip_high": 1e6},
    ],
)
def test_the_expected_gradient_is_that_of_the_kl_in_the_states_that_mu_visits(
    names: dict[str, Any],
) -> None:
    logits = table(0)

    found = expected_gradient(logits, LOG_MU, names)

    assert torch.allclose(found, slopes_of_kl(logits, LOG_MU), atol=1e-9)
    assert float(found.norm()) > 0.1


def test_on_policy_the_gradient_is_that_in_its_own_states() -> None:
    logits = table(0)

    found = expected_gradient(logits, logits.log_softmax(-1), PLAIN)

    assert torch.allclose(found, slopes_of_kl(logits, logits.log_softmax(-1)), atol=1e-9)


def test_a_policy_that_is_the_teacher_has_no_gradient() -> None:
    found = expected_gradient(LOG_TEACHER, LOG_MU, PLAIN)

    assert float(found.abs().max()) < 1e-12


def test_the_weight_scales_the_gradient() -> None:
    logits = table(0)

    half = expected_gradient(logits, LOG_MU, PLAIN, weight=0.5)

    assert torch.allclose(2 * half, expected_gradient(logits, LOG_MU, PLAIN), atol=1e-12)


def test_following_it_off_policy_ends_at_the_teacher() -> None:
    logits = table(0)

    for _ in range(1000):
        logits = logits - 2.0 * expected_gradient(logits, LOG_MU, PLAIN)

    assert exact_kl(logits, LOG_MU) < 0.05 * exact_kl(table(0), LOG_MU)


def test_a_token_without_a_teacher_has_none_of_its_advantage() -> None:
    log_teacher_N = torch.tensor([-1.0, float("nan"), -3.0])

    advantages_N = teacher_advantages(torch.tensor([-2.0, -2.0, -2.0]), log_teacher_N, 0.5)

    assert advantages_N.tolist() == [0.5, 0.0, -0.5]
