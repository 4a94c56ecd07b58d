"""Divergence figures against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from buffer.episode import PolicyVersion
from configs.settings import AlgorithmSettings
from learner.diagnostics import DivergenceMeter
from learner.metrics import batch_figures
from learner.ranks import Ranks
from tests.learner.made_episodes import make_episode

LOG_RHOS = [0.0, 0.5, -0.5, 1.0, 0.001]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0, 1.0]
LAGS = [0, 1, 1, 2, 0]


def test_figures_equal_their_formulas_however_the_batch_is_cut(ranks: Ranks) -> None:
    meter = DivergenceMeter(AlgorithmSettings(), ranks.device)
    for part in (slice(0, 2), slice(2, 2), slice(2, 5)):
        meter.add(
            torch.tensor(LOG_RHOS[part], dtype=torch.float64),
            torch.tensor(ADVANTAGES[part]),
            torch.tensor([0.25] * len(LOG_RHOS))[part],
            torch.tensor(LAGS[part]),
        )

    figures = meter.merge(ranks)

    rhos = [math.exp(x) for x in LOG_RHOS]
    assert figures.ratio_mean == pytest.approx(sum(rhos) / 5)
    assert figures.ratio_max == pytest.approx(math.e)
    assert figures.lag0_ratio_mean == pytest.approx((1 + math.exp(0.001)) / 2)
    assert figures.lag0_logprob_diff_max == pytest.approx(0.001)
    assert figures.lag0_tokens == 2
    assert figures.effective_sample_size == pytest.approx(
        sum(rhos) ** 2 / (5 * sum(rho**2 for rho in rhos))
    )
    assert figures.clip_fraction_high == pytest.approx(1 / 5)  # exp(0.5) > 1.28
    assert figures.clip_fraction_low == pytest.approx(1 / 5)  # exp(-0.5) < 0.8
    assert figures.truncated_fraction == pytest.approx(1 / 5)  # e > 2
    assert figures.kl == pytest.approx(
        sum(rho * x - rho + 1 for rho, x in zip(rhos, LOG_RHOS, strict=True)) / 5
    )
    assert figures.entropy == pytest.approx(0.25)


def test_the_kl_estimate_is_unbiased(ranks: Ranks) -> None:
    """Weigh every outcome with its probability under mu: the estimate is the exact KL(pi || mu)."""
    pi, mu = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]
    meter = DivergenceMeter(AlgorithmSettings(), ranks.device)
    for p, m in zip(pi, mu, strict=True):
        log_rhos = torch.full((round(m * 100),), math.log(p / m), dtype=torch.float64)
        meter.add(log_rhos, log_rhos, log_rhos, torch.ones_like(log_rhos))

    exact = sum(p * math.log(p / m) for p, m in zip(pi, mu, strict=True))
    assert meter.merge(ranks).kl == pytest.approx(exact)


def test_a_batch_without_a_trained_token_counts_as_on_policy(ranks: Ranks) -> None:
    figures = DivergenceMeter(AlgorithmSettings(), ranks.device).merge(ranks)

    assert (figures.ratio_mean, figures.effective_sample_size, figures.kl) == (1.0, 1.0, 0.0)


def test_batch_figures_count_trained_tokens_by_lag() -> None:
    episodes = [
        make_episode(0, group_id=0, reward=1.0, completion=[8] * 3, mask=[1, 0, 1]),
        make_episode(1, group_id=0, reward=0.0, versions=[(PolicyVersion(1, 2), 0)]),
        make_episode(2, group_id=1, reward=0.5, finish_reason="length"),
        make_episode(
            3,
            group_id=1,
            reward=0.5,
            versions=[(PolicyVersion(1, 1), 0), (PolicyVersion(1, 2), 1)],
        ),
    ]

    figures = batch_figures(episodes, step=3, lineage=1, lineages={1: 0})

    assert (figures.episodes, figures.groups, figures.trained_tokens) == (4, 2, 8)
    assert figures.policy_lag_histogram == {"0": 3, "1": 1, "2": 4}
    assert figures.policy_lag_mean == pytest.approx(9 / 8)
    assert (figures.zero_variance_groups, figures.mixed_version_episodes) == (1, 1)
    assert figures.reward_mean == pytest.approx(0.5)
    assert figures.reward_parts == {"exact": pytest.approx(0.25)}
    assert figures.truncated_fraction == pytest.approx(0.25)
