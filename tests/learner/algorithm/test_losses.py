"""Every legal choice of names against its formula in float64, and its limit cases."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from configs.settings import AlgorithmSettings, Settings
from configs.validation.algorithm import SEQUENCE_WEIGHTS
from learner.algorithm.aggregations import AGGREGATIONS, MinibatchSize
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.losses import PROXIMALS, PolicyLoss, policy_loss
from learner.algorithm.microbatch import PreparedMicrobatch
from learner.algorithm.surrogates import SURROGATES
from tests.learner.support import loss_formulas
from tests.learner.support.loss_formulas import Tokens
from tests.learner.support.made_tokens import make_prepared
from tests.learner.support.user_losses import our_names

LENGTHS = (3, 1, 5, 2)
ADVANTAGES = (1.0, -0.5, -2.0, 0.25)
BOUND = 0.4
# Wide enough that every mask keeps some episodes and drops others, and every bound acts somewhere.
BOUNDS = {"geo_low": 0.8, "geo_high": 1.3, "veto": 0.3, "mask_low": 0.6, "mask_high": 1.7}
CLIPS = {"gspo": {"clip_low": 0.3, "clip_high": 0.3}}


def _is_legal(algorithm: dict[str, Any]) -> bool:
    run = {"model": "init", "max_policy_lag": 2}
    try:
        Settings.model_validate({"run": run, "algorithm": algorithm})
    except ValidationError:
        return False
    return True


CHOICES = [
    names
    for names in itertools.product(CORRECTIONS, SURROGATES, PROXIMALS)
    if _is_legal(dict(zip(("correction", "surrogate", "proximal"), names, strict=True)))
]


def _settings(correction: str, surrogate: str, proximal: str, **others: Any) -> AlgorithmSettings:
    names = {"correction": correction, "surrogate": surrogate, "proximal": proximal}
    bounds = {**BOUNDS, **CLIPS.get(surrogate, {}), **others}
    return AlgorithmSettings.model_validate({**names, **bounds})


def _weights(aggregation: str) -> list[float]:
    counts = MinibatchSize(tokens=sum(LENGTHS), episodes=len(LENGTHS), max_completion_tokens=8)
    weights_E = AGGREGATIONS[aggregation](np.array(LENGTHS), counts)
    return [float(weight) for weight in weights_E]


def _episodes(aggregation: str, *, seed: int = 3, spread: float = 0.5) -> list[Tokens]:
    chance = random.Random(seed)
    episodes = []
    for length, advantage, weight in zip(LENGTHS, ADVANTAGES, _weights(aggregation), strict=True):
        log_mu = [-chance.uniform(0.5, 2.0) for _ in range(length)]
        log_prox = [mu + chance.gauss(0, spread) * 0.6 for mu in log_mu]
        log_pi = [min(-0.05, prox + chance.gauss(0, spread)) for prox in log_prox]
        lags = [chance.randrange(3) for _ in range(length)]
        episodes.append(Tokens(log_mu, log_prox, log_pi, lags, [advantage] * length, weight))
    return episodes


def _flat(values: list[list[float]], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([x for episode in values for x in episode], dtype=dtype)


def _prepared(episodes: list[Tokens], dtype: torch.dtype = torch.float64) -> PreparedMicrobatch:
    return make_prepared(
        _flat([episode.log_mu for episode in episodes], dtype),
        _flat([episode.advantages for episode in episodes], dtype),
        _flat([[episode.weight] * len(episode.log_mu) for episode in episodes], dtype),
        lengths=[len(episode.log_mu) for episode in episodes],
        lags_N=torch.tensor([lag for episode in episodes for lag in episode.lags]),
        log_prox_N=_flat([episode.log_prox for episode in episodes], dtype),
        log_ratio_bound=BOUND,
    )


def _differentiate(
    episodes: list[Tokens], settings: AlgorithmSettings, dtype: torch.dtype = torch.float64
) -> tuple[PolicyLoss, Tensor]:
    log_pi_N = _flat([episode.log_pi for episode in episodes], dtype).requires_grad_()
    found = policy_loss(log_pi_N, torch.zeros_like(log_pi_N), _prepared(episodes, dtype), settings)
    (gradient_N,) = torch.autograd.grad(found.loss, log_pi_N)
    return found, gradient_N


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("correction", CORRECTIONS),
        ("surrogate", SURROGATES),
        ("aggregation", AGGREGATIONS),
        ("proximal", PROXIMALS),
    ],
)
def test_the_settings_know_the_names_of_the_tables(key: str, table: dict[str, Any]) -> None:
    assert our_names(key) == set(table)


@pytest.mark.parametrize("table", [CORRECTIONS, SURROGATES, AGGREGATIONS, PROXIMALS], ids=min)
def test_every_name_says_its_formula_when_to_use_it_and_where_it_comes_from(
    table: dict[str, Any],
) -> None:
    for function in table.values():
        text = inspect.cleandoc(function.__doc__)
        assert all(f"\n{word}:\n" in text for word in ("Formula", "Use", "Source"))


@pytest.mark.parametrize(("correction", "surrogate", "proximal"), CHOICES)
def test_loss_and_gradient_equal_the_formula(
    correction: str, surrogate: str, proximal: str
) -> None:
    settings = _settings(correction, surrogate, proximal)
    for aggregation in AGGREGATIONS:
        episodes = _episodes(aggregation)

        found, gradient_N = _differentiate(episodes, settings)

        held = [episode.log_pi for episode in episodes]
        expected = loss_formulas.loss(held, episodes, settings, BOUND)
        assert found.loss.item() == pytest.approx(expected, abs=1e-10)
        slopes = loss_formulas.slopes(episodes, settings, BOUND)
        assert gradient_N.tolist() == pytest.approx(slopes, abs=1e-8)
        assert any(slopes)


@pytest.mark.parametrize(("correction", "surrogate", "proximal"), CHOICES)
def test_float32_is_within_rounding_of_float64(
    correction: str, surrogate: str, proximal: str
) -> None:
    settings, episodes = _settings(correction, surrogate, proximal), _episodes("token")

    exact, exact_gradient_N = _differentiate(episodes, settings)
    single, single_gradient_N = _differentiate(episodes, settings, torch.float32)

    assert single.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5, abs=1e-6)
    size = float(exact_gradient_N.norm())
    assert float((single_gradient_N - exact_gradient_N).norm()) <= 1e-5 * size


@pytest.mark.parametrize(("correction", "surrogate", "proximal"), CHOICES)
def test_at_pi_equal_mu_every_choice_has_the_on_policy_gradient(
    correction: str, surrogate: str, proximal: str
) -> None:
    episodes = _episodes("token", spread=0.0)

    _, gradient_N = _differentiate(episodes, _settings(correction, surrogate, proximal))

    expected = [-e.weight * advantage for e in episodes for advantage in e.advantages]
    assert gradient_N.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("correction", "surrogate", "proximal"), CHOICES)
def test_the_order_of_episodes_changes_nothing(
    correction: str, surrogate: str, proximal: str
) -> None:
    settings, episodes = _settings(correction, surrogate, proximal), _episodes("sequence")

    found, _ = _differentiate(episodes, settings)
    turned, _ = _differentiate(episodes[::-1], settings)
    parts = [_differentiate([episode], settings)[0] for episode in episodes]

    assert turned.loss.item() == pytest.approx(found.loss.item(), abs=1e-10)
    assert sum(part.loss.item() for part in parts) == pytest.approx(found.loss.item(), abs=1e-10)
    assert torch.cat([part.kept_N for part in parts]).equal(found.kept_N)
    assert torch.cat([part.high_N for part in parts]).equal(found.high_N)


@pytest.mark.parametrize("proximal", sorted(PROXIMALS))
@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_infinite_bounds_are_plain_importance_sampling(correction: str, proximal: str) -> None:
    """Token by token, or with the product of the episode: pi/mu A dlog(pi), about either anchor."""
    if correction == "none" and proximal != "behaviour":
        pytest.skip("weighs nothing there, by name")
    wide: dict[str, Any] = {"rho_bar": 1e9, "mask_low": 0, "mask_high": 1e9, "geo_low": 0}
    wide |= {"geo_high": 1e9, "veto": 1e-300}
    episodes = _episodes("token")

    _, gradient_N = _differentiate(episodes, _settings(correction, "reinforce", proximal, **wide))

    expected = []
    for episode in episodes:
        log_rhos = [pi - mu for pi, mu in zip(episode.log_pi, episode.log_mu, strict=True)]
        share = 1 / len(log_rhos) if correction == "geo_tis" else 1.0
        for t, advantage in enumerate(episode.advantages):
            log_rho = log_rhos[t]
            if correction in SEQUENCE_WEIGHTS and proximal == "behaviour":
                log_rho = share * sum(log_rhos)
            elif correction in SEQUENCE_WEIGHTS:
                anchor = loss_formulas._anchor(episode, _settings("tis", "clip", proximal))
                ratio = episode.log_pi[t] - anchor[t]
                gaps = (a - mu for a, mu in zip(anchor, episode.log_mu, strict=True))
                log_rho = ratio + share * sum(gaps)
            expected.append(-episode.weight * math.exp(log_rho) * advantage)
    assert gradient_N.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_expected_gradient_off_policy_is_the_on_policy_one() -> None:
    """E_mu[rho A dlog pi] = E_pi[A dlog pi], by enumeration: rho twice, or never, would fail."""
    logits = torch.tensor([0.3, -0.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    log_pi, prox = logits.log_softmax(0), torch.tensor([0.1, 0.5, 0.1, 0.3]).double()
    on_policy_objective = (log_pi.detach().exp() * advantages * log_pi).sum()
    (on_policy,) = torch.autograd.grad(on_policy_objective, logits, retain_graph=True)

    for correction, proximal in (
        ("none", "behaviour"),
        ("tis", "recomputed"),
        ("tis", "interpolated"),
    ):
        settings = _settings(correction, "reinforce", proximal, rho_bar=1e9)
        lags = torch.tensor([0, 1, 2, 3])
        prepared = make_prepared(mu.log(), advantages, mu, lags_N=lags, log_prox_N=prox.log())
        loss = policy_loss(log_pi, torch.zeros(4), prepared, settings).loss
        (off_policy,) = torch.autograd.grad(-loss, logits, retain_graph=True)
        assert torch.allclose(off_policy, on_policy, atol=1e-12)


def test_without_a_scored_token_the_loss_is_zero() -> None:
    nothing = torch.zeros(0)
    prepared = make_prepared(nothing, nothing, nothing, lengths=[0], log_prox_N=nothing)

    for correction, surrogate, proximal in CHOICES:
        settings = _settings(correction, surrogate, proximal)
        assert policy_loss(nothing, nothing, prepared, settings).loss.item() == 0


def test_the_entropy_bonus_pays_by_the_token_weights() -> None:
    settings = AlgorithmSettings(entropy_bonus=0.5)
    entropies = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    zeros, weights = torch.zeros(2, dtype=torch.float64), torch.tensor([0.25, 0.75]).double()

    loss = policy_loss(zeros, entropies, make_prepared(zeros, zeros, weights), settings).loss
    loss.backward()

    assert loss.item() == pytest.approx(-0.5 * (0.25 * 1.0 + 0.75 * 3.0))
    assert entropies.grad is not None
    assert entropies.grad.tolist() == pytest.approx([-0.125, -0.375])
