"""Divergence figures against their formulas, written as loops over tokens and episodes."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch

from buffer.record.episode import PolicyVersion
from configs.settings import AlgorithmSettings
from learner.algorithm.losses import PolicyLoss
from learner.algorithm.microbatch import Microbatch, empty_microbatch
from learner.model.ranks import Ranks
from learner.reporting.metrics import (
    BatchFigures,
    StepTimes,
    batch_figures,
    environment_figures,
)
from learner.training import divergence, ratio_bins
from learner.training.critic import CriticFigures
from learner.training.divergence import Divergence, DivergenceMeter
from learner.training.optimizer import StepOutcome
from tests.learner.support.made_episodes import make_episode

# Three episodes of two, one and three tokens, of which no two have the same ratio.
LOG_RHOS = [0.0, 0.5, -0.5, 1.0, 0.001, -2.0]
ADVANTAGES = [1.0, 1.0, -1.0, -1.5, -1.5, -1.5]
ENTROPIES = [0.25, 0.5, 0.75, 0.25, 0.5, 1.5]
LAGS = [0, 0, 1, 2, 0, 1]
IS_KEPT = [True, True, False, True, False, False]
IS_LOW = [False, False, False, True, False, False]
IS_HIGH = [True, True, False, False, False, False]
LOG_RATIOS_TO_REF = [0.1, -0.3, 0.7, 0.0, 1.2, -0.4]
LOG_RATIOS_TO_TEACHER = [0.2, math.nan, -0.1, math.nan, 0.4, 0.9]
EPISODES = [0, 0, 1, 2, 2, 2]
OLDEST_LAGS = [0, 1, 2]
N = len(LOG_RHOS)


def _microbatch(rows: slice = slice(None)) -> Microbatch:
    """Make one of these rows; what the meter does not read is empty."""
    episodes = torch.tensor(EPISODES[rows])
    first = episodes.min() if len(episodes) else 0
    return replace(
        empty_microbatch(),
        behaviour_logprobs_N=torch.zeros(len(episodes)),
        advantages_N=torch.tensor(ADVANTAGES[rows]),
        lags_N=torch.tensor(LAGS[rows]),
        episodes_N=episodes - first,
        rewards_B=torch.zeros(len(set(EPISODES[rows]))),
        oldest_lags_B=torch.tensor([OLDEST_LAGS[number] for number in sorted(set(EPISODES[rows]))]),
    )


def _found(rows: slice = slice(None)) -> PolicyLoss:
    kept, low, high = (
        torch.tensor(flags[rows], dtype=torch.bool) for flags in (IS_KEPT, IS_LOW, IS_HIGH)
    )
    return PolicyLoss(torch.zeros(()), kept_N=kept, low_N=low, high_N=high)


def _measure(ranks: Ranks, *cuts: slice) -> Divergence:
    meter = DivergenceMeter(AlgorithmSettings(kl_coefficient=0.1), ranks.device)
    for rows in cuts:
        log_rhos = torch.tensor(LOG_RHOS[rows], dtype=torch.float64)
        deltas = torch.tensor(LOG_RATIOS_TO_REF[rows], dtype=torch.float64)
        meter.add(
            log_rhos,
            torch.tensor(ENTROPIES[rows]),
            _microbatch(rows),
            _found(rows),
            deltas,
            from_teacher_N=torch.tensor(LOG_RATIOS_TO_TEACHER[rows], dtype=torch.float64),
        )
    return meter.merge(ranks)


def test_figures_of_ratios_equal_their_formulas(ranks: Ranks) -> None:
    figures = _measure(ranks, slice(None))

    rhos = [math.exp(x) for x in LOG_RHOS]
    assert figures.ratio_mean == pytest.approx(sum(rhos) / N)
    assert figures.ratio_std == pytest.approx(float(np.std(rhos)))
    assert figures.ratio_max == pytest.approx(math.e)
    assert figures.effective_sample_size == pytest.approx(
        sum(rhos) ** 2 / (N * sum(rho**2 for rho in rhos))
    )
    assert figures.chi_square == pytest.approx(sum(rho**2 for rho in rhos) / N - 1)
    assert figures.clip_fraction_high == pytest.approx(2 / N)
    assert figures.clip_fraction_low == pytest.approx(1 / N)
    assert figures.mask_fraction_high == pytest.approx(1 / N)  # exp(0.001)
    assert figures.mask_fraction_low == pytest.approx(2 / N)  # exp(-0.5), exp(-2)
    assert figures.truncated_fraction == pytest.approx(1 / N)  # e > 2
    assert figures.entropy == pytest.approx(sum(ENTROPIES) / N)


def test_after_an_optimizer_step_no_token_counts_as_on_policy(ranks: Ranks) -> None:
    meter = DivergenceMeter(AlgorithmSettings(), ranks.device)
    meter.policy_moved()
    log_rhos = torch.tensor(LOG_RHOS, dtype=torch.float64)

    meter.add(log_rhos, torch.tensor(ENTROPIES), _microbatch(), _found())

    figures = meter.merge(ranks)
    assert (figures.lag0_tokens, figures.lag0_logprob_diff_max) == (0, 0.0)
    assert figures.lagged_ratio_mean == pytest.approx(sum(map(math.exp, LOG_RHOS)) / N)


def test_an_episodes_ratio_is_the_product_over_its_tokens(ranks: Ranks) -> None:
    figures = _measure(ranks, slice(None))

    ratios = [math.exp(0.5), math.exp(-0.5), math.exp(1.0 + 0.001 - 2.0)]
    assert figures.sequence_ratio_mean == pytest.approx(sum(ratios) / 3)
    assert figures.sequence_effective_sample_size == pytest.approx(
        sum(ratios) ** 2 / (3 * sum(ratio**2 for ratio in ratios))
    )


def test_a_temperature_that_is_off_shows_in_what_likely_tokens_differ_by(ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(N, 50, generator=generator, dtype=torch.float64)
    pi, mu = logits.log_softmax(-1), (logits / 1.1).log_softmax(-1)
    drawn = mu.exp().multinomial(1, generator=generator)
    pi_N, mu_N = pi.gather(1, drawn)[:, 0], mu.gather(1, drawn)[:, 0]
    entropies_N = -(pi.exp() * pi).sum(-1)
    microbatch = replace(
        _microbatch(), behaviour_logprobs_N=mu_N, oldest_lags_B=torch.zeros(3, dtype=torch.int64)
    )
    meter = DivergenceMeter(AlgorithmSettings(), ranks.device)

    meter.add(pi_N - mu_N, entropies_N, microbatch, _found())

    figures = meter.merge(ranks)
    assert figures.lag0_temperature_excess == pytest.approx(0.1, abs=0.04)
    spread = float((pi_N + entropies_N).square().sum())
    assert figures.lag0_temperature_weight == pytest.approx(spread)


def test_numerics_are_told_apart_from_staleness(ranks: Ranks) -> None:
    figures = _measure(ranks, slice(None))

    assert figures.lag0_tokens == 2, "not the fifth: its episode saw a swap"
    assert figures.lag0_ratio_mean == pytest.approx((1 + math.exp(0.5)) / 2)
    assert figures.lag0_ratio_max == pytest.approx(math.exp(0.5))
    assert figures.lag0_logprob_diff_mean == pytest.approx(0.25)
    assert figures.lag0_logprob_diff_max == pytest.approx(0.5)
    assert figures.lagged_ratio_mean == pytest.approx(
        sum(math.exp(x) for x in (-0.5, 1.0, 0.001, -2.0)) / 4
    )
    assert figures.lagged_logprob_diff_mean == pytest.approx(3.501 / 4)
    assert figures.lagged_logprob_diff_max == pytest.approx(2.0)


def test_kl_estimators_equal_their_formulas(ranks: Ranks) -> None:
    """Schulman 2020, "Approximating KL divergence": k1, k2, k3; under pi weighed with rho."""
    figures = _measure(ranks, slice(None))

    def mean(terms: list[float]) -> float:
        return sum(terms) / N

    assert figures.kl_mu_pi_k1 == pytest.approx(mean([-x for x in LOG_RHOS]))
    assert figures.kl_mu_pi_k2 == pytest.approx(mean([x**2 / 2 for x in LOG_RHOS]))
    assert figures.kl_mu_pi_k3 == pytest.approx(mean([math.exp(x) - 1 - x for x in LOG_RHOS]))
    assert figures.kl_pi_mu_k1 == pytest.approx(mean([math.exp(x) * x for x in LOG_RHOS]))
    assert figures.kl_pi_mu_k2 == pytest.approx(mean([math.exp(x) * x**2 / 2 for x in LOG_RHOS]))
    assert figures.kl_pi_mu_k3 == pytest.approx(
        mean([math.exp(x) * (math.exp(-x) - 1 + x) for x in LOG_RHOS])
    )


def test_the_kl_to_the_reference_is_weighed_with_the_ratio_to_mu(ranks: Ranks) -> None:
    figures = _measure(ranks, slice(None))

    pairs = list(zip(LOG_RHOS, LOG_RATIOS_TO_REF, strict=True))
    assert figures.kl_pi_ref_k1 == pytest.approx(sum(math.exp(x) * d for x, d in pairs) / N)
    assert figures.kl_pi_ref_k2 == pytest.approx(sum(math.exp(x) * d**2 / 2 for x, d in pairs) / N)
    assert figures.kl_pi_ref_k3 == pytest.approx(
        sum(math.exp(x) * (math.exp(-d) - 1 + d) for x, d in pairs) / N
    )
    alone = DivergenceMeter(AlgorithmSettings(), ranks.device).merge(ranks)
    assert alone.kl_pi_ref_k3 is None, "there is no reference"


def test_the_kl_to_teachers_is_the_mean_over_the_tokens_that_have_one(ranks: Ranks) -> None:
    figures = _measure(ranks, slice(None))

    pairs = zip(LOG_RHOS, LOG_RATIOS_TO_TEACHER, strict=True)
    taught = [math.exp(x) * d for x, d in pairs if not math.isnan(d)]
    assert len(taught) < N
    assert figures.teacher_kl == pytest.approx(sum(taught) / len(taught))
    assert DivergenceMeter(AlgorithmSettings(), ranks.device).merge(ranks).teacher_kl is None


def test_advantages_are_summed_up_over_tokens(ranks: Ranks) -> None:
    figures = _measure(ranks, slice(None))

    assert figures.advantage_mean == pytest.approx(sum(ADVANTAGES) / N)
    assert figures.advantage_std == pytest.approx(float(np.std(ADVANTAGES)))
    assert (figures.advantage_min, figures.advantage_max) == (-1.5, 1.0)


def test_percentiles_are_those_of_the_ratios(ranks: Ranks) -> None:
    percentiles = _measure(ranks, slice(None)).ratio_percentiles

    ordered = sorted(LOG_RHOS)
    for percent, rank in {"1": 1, "25": 2, "50": 3, "75": 5, "99": 6}.items():
        assert math.log(percentiles[percent]) == pytest.approx(
            ordered[rank - 1], rel=0.05, abs=1e-5
        )


def test_log_ratios_are_counted_in_bins_that_their_edges_name(ranks: Ranks) -> None:
    counted = _measure(ranks, slice(None)).log_ratio_histogram

    edges = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
    assert [float(name) for name in counted] == [-edge for edge in reversed(edges)] + [0.0, *edges]
    assert {name: counted[name] for name in ("0", "-0.3", "-1")} == {"0": 1, "-0.3": 1, "-1": 1}
    assert sum(counted.values()) == N


@pytest.mark.parametrize("name", ratio_bins.NAMES)
def test_a_bin_holds_what_lies_between_its_edges(name: str) -> None:
    i = ratio_bins.NAMES.index(name)
    low, high = (-math.inf, *ratio_bins.EDGES, math.inf)[i : i + 2]
    within = (0.0, 1e-9, low + 0.05 * abs(low), high - 0.05 * abs(high), 200.0, -200.0)

    counts = divergence.count(torch.tensor([x for x in within if low < x < high]))

    found = divergence.in_few_bins(counts)
    assert found.pop(name) == int(counts.sum()) > 0
    assert not any(found.values())


def test_figures_do_not_depend_on_how_the_batch_is_cut(ranks: Ranks) -> None:
    whole = asdict(_measure(ranks, slice(None)))

    cut = asdict(_measure(ranks, slice(3, 6), slice(0, 0), slice(2, 3), slice(0, 2)))

    for key in ("ratio_percentiles", "log_ratio_histogram"):
        assert cut.pop(key) == whole.pop(key)
    assert cut == pytest.approx(whole, rel=1e-12)


def test_ratios_beyond_a_float_leave_figures_finite(ranks: Ranks) -> None:
    meter = DivergenceMeter(AlgorithmSettings(), ranks.device)
    meter.add(torch.tensor([1e30] * N), torch.tensor(ENTROPIES), _microbatch(), _found())

    figures = meter.merge(ranks)

    assert all(math.isfinite(x) for x in (figures.ratio_max, figures.chi_square))
    assert figures.effective_sample_size == pytest.approx(1.0)


def test_values_stay_within_their_bin() -> None:
    values = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    for value in (*values.tolist(), 1e-6, -3e-5, 250.0):
        counts = divergence.count(torch.tensor([value]))
        assert divergence.percentile(counts, 50) == pytest.approx(value, rel=0.05, abs=1e-5)
    assert divergence.percentile(divergence.count(torch.zeros(0)), 50) == 0.0


def test_the_kl_estimates_are_unbiased(ranks: Ranks) -> None:
    """Weigh every outcome with its probability under mu: k1 and k3 are exact, both ways."""
    pi, mu = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]
    log_rhos = [x for p, m in zip(pi, mu, strict=True) for x in [math.log(p / m)] * round(m * 100)]
    row = torch.zeros(len(log_rhos))
    microbatch = replace(
        empty_microbatch(),
        behaviour_logprobs_N=row,
        advantages_N=row,
        episodes_N=row.long(),
    )
    meter = DivergenceMeter(AlgorithmSettings(), ranks.device)
    flags = row.bool()
    found = PolicyLoss(row, kept_N=~flags, low_N=flags, high_N=flags)
    meter.add(torch.tensor(log_rhos, dtype=torch.float64), row, microbatch, found)

    figures = meter.merge(ranks)

    forwards = sum(p * math.log(p / m) for p, m in zip(pi, mu, strict=True))
    backwards = sum(m * math.log(m / p) for p, m in zip(pi, mu, strict=True))
    assert figures.kl_pi_mu_k1 == pytest.approx(forwards)
    assert figures.kl_pi_mu_k3 == pytest.approx(forwards)
    assert figures.kl_mu_pi_k1 == pytest.approx(backwards)
    assert figures.kl_mu_pi_k3 == pytest.approx(backwards)


def test_a_batch_without_a_trained_token_counts_as_on_policy(ranks: Ranks) -> None:
    figures = DivergenceMeter(AlgorithmSettings(), ranks.device).merge(ranks)

    assert (figures.ratio_mean, figures.ratio_std, figures.ratio_max) == (1.0, 0.0, 1.0)
    assert (figures.effective_sample_size, figures.sequence_effective_sample_size) == (1.0, 1.0)
    assert (figures.kl_pi_mu_k3, figures.kl_mu_pi_k1, figures.chi_square) == (0.0, 0.0, 0.0)
    assert (figures.advantage_min, figures.advantage_max, figures.lag0_tokens) == (0.0, 0.0, 0)


def test_figures_of_a_batch_are_counted_by_environment() -> None:
    rewards = {0: [1.0, 0.0], 1: [0.5, 0.5], 2: [0.25, 1.0]}
    episodes = [
        make_episode(2 * group + i, group_id=group, reward=reward)
        for group, pair in rewards.items()
        for i, reward in enumerate(pair)
    ]
    episodes[:4] = [replace(episode, reward_parts={}) for episode in episodes[:4]]

    figures = environment_figures(episodes, lambda group: "words" if group == 2 else "sums")

    assert figures == {
        "sums": {"episodes": 4, "groups": 2, "zero_variance_groups": 1, "reward_mean": 0.5},
        "words": {
            "episodes": 2,
            "groups": 1,
            "zero_variance_groups": 0,
            "reward_mean": 0.625,
            "accuracy": 0.5,
        },
    }


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

    figures = batch_figures(episodes, step=3, lineage=1, lineages={1: 0}, uses={})

    assert (figures.episodes, figures.groups, figures.trained_tokens) == (4, 2, 8)
    assert figures.policy_lag_histogram == {"0": 3, "1": 1, "2": 4}
    assert figures.policy_lag_mean == pytest.approx(9 / 8)
    assert (figures.zero_variance_groups, figures.mixed_version_episodes) == (1, 1)
    assert figures.reward_mean == pytest.approx(0.5)
    assert figures.reward_parts == {"exact": pytest.approx(0.25)}
    assert figures.response_truncated_fraction == pytest.approx(0.25)


def test_no_two_figures_of_a_batch_have_one_name() -> None:
    parts = (BatchFigures, Divergence, StepOutcome, CriticFigures, StepTimes)
    names = [field.name for part in parts for field in fields(part)]

    assert sorted(names) == sorted(set(names))
