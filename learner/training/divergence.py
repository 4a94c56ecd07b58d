"""Figures of a batch's divergence of pi from mu, from sums over tokens and episodes.

Owns names and meanings of the figures; `divergence_meter.py` adds up the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from . import histogram

T = TypeVar("T")
"""`Tensor` for the terms of tokens, `float` for the sums over a batch."""

PERCENTS = (1, 5, 25, 50, 75, 95, 99)


@dataclass(frozen=True, slots=True)
class Divergence:
    """pi against mu over the trained tokens of one batch; no token counts as pi = mu."""

    ratio_mean: float
    """Mean of rho = pi/mu; 1 in expectation as long as mu covers pi."""
    ratio_std: float
    """Standard deviation of rho."""
    ratio_max: float
    """Largest rho."""
    ratio_percentiles: dict[str, float]
    """Percent -> rho, within 5 % of its log."""
    log_ratio_histogram: dict[str, int]
    """Bin of log(rho), nats -> trained tokens. A bin is named by its edge nearer to 0: `0.03` holds
    0.03 to 0.1, `-0.03` holds -0.1 to -0.03, `3` all above, `0` what is within 0.001 of 0."""
    lag0_tokens: int
    """Tokens at lag 0 before the batch's first optimizer step, where pi = mu: a difference there is
    numerical alone."""
    lag0_ratio_mean: float
    """Mean rho at lag 0."""
    lag0_ratio_max: float
    """Largest rho at lag 0."""
    lag0_logprob_diff_mean: float
    """Mean |log pi - log mu| at lag 0, nats: the engine's rounding against the learner's."""
    lag0_logprob_diff_max: float
    """Largest |log pi - log mu| at lag 0, nats."""
    lagged_ratio_mean: float
    """Mean rho at lag 1 and above: numerics and the movement of pi since."""
    lagged_logprob_diff_mean: float
    """Mean |log pi - log mu| at lag 1 and above, nats."""
    lagged_logprob_diff_max: float
    """Largest |log pi - log mu| at lag 1 and above, nats."""
    effective_sample_size: float
    """(sum rho)^2 / (N sum rho^2), in (0, 1]: the share of tokens that carry information."""
    sequence_effective_sample_size: float
    """The same of whole episodes, whose ratio is the product over their tokens."""
    sequence_ratio_mean: float
    """Mean over episodes of that product."""
    clip_fraction_low: float
    """Share of tokens that the surrogate's lower bound acted on."""
    clip_fraction_high: float
    """Share of tokens that the surrogate's upper bound acted on."""
    mask_fraction_low: float
    """Share of tokens that the correction masked and whose rho is below 1."""
    mask_fraction_high: float
    """Share of tokens that the correction masked and whose rho is not."""
    truncated_fraction: float
    """Share of tokens with rho > rho_bar."""
    kl_pi_mu_k1: float
    """KL(pi || mu) per token, nats: mean of rho log(rho)."""
    kl_pi_mu_k2: float
    """KL(pi || mu) to second order: mean of rho log(rho)^2 / 2."""
    kl_pi_mu_k3: float
    """KL(pi || mu): mean of rho log(rho) - rho + 1, unbiased, never negative."""
    kl_mu_pi_k1: float
    """KL(mu || pi) per token, nats: mean of -log(rho)."""
    kl_mu_pi_k2: float
    """KL(mu || pi) to second order: mean of log(rho)^2 / 2."""
    kl_mu_pi_k3: float
    """KL(mu || pi): mean of rho - 1 - log(rho), unbiased, never negative."""
    kl_pi_ref_k1: float | None
    """KL(pi || ref) per token, nats: mean of rho log(pi/ref); None without a reference."""
    kl_pi_ref_k2: float | None
    """KL(pi || ref) to second order: mean of rho log(pi/ref)^2 / 2."""
    kl_pi_ref_k3: float | None
    """KL(pi || ref): mean of rho (ref/pi - 1 - log(ref/pi)), unbiased, never negative."""
    chi_square: float
    """chi^2(pi || mu) per token: mean of rho^2 - 1, how much the ratios add to the variance."""
    entropy: float
    """Mean entropy of pi at the sampling temperature, nats."""
    advantage_mean: float
    """Mean over trained tokens."""
    advantage_std: float
    """Standard deviation over trained tokens."""
    advantage_min: float
    """Least of a trained token."""
    advantage_max: float
    """Largest of a trained token."""


class Sums(NamedTuple, Generic[T]):
    """Quantities summed over tokens: the terms of each token, then their sums."""

    tokens: T
    ratio: T
    ratio_squared: T
    ratio_log: T
    """rho log(rho)."""
    ratio_log_squared: T
    """rho log(rho)^2."""
    log: T
    log_squared: T
    lag0: T
    lag0_ratio: T
    lag0_diff: T
    lagged_ratio: T
    lagged_diff: T
    low: T
    high: T
    masked_low: T
    masked_high: T
    truncated: T
    ref_k1: T
    """rho log(pi/ref)."""
    ref_k2: T
    ref_k3: T
    entropy: T
    advantage: T
    advantage_squared: T


class Extremes(NamedTuple, Generic[T]):
    """Quantities of which the largest over tokens is kept."""

    ratio: T
    lag0_ratio: T
    lag0_diff: T
    lagged_diff: T
    advantage: T
    minus_advantage: T


class EpisodeSums(NamedTuple, Generic[T]):
    """Quantities summed over episodes, with the ratio of a whole episode."""

    episodes: T
    ratio: T
    ratio_squared: T


ONE_ON_POLICY_TOKEN = (
    Sums(1.0, 1.0, 1.0, *[0.0] * (len(Sums._fields) - 3)),
    Extremes(1.0, *[0.0] * (len(Extremes._fields) - 1)),
    EpisodeSums(1.0, 1.0, 1.0),
)
"""Stands for a batch without trained tokens: pi = mu and advantage 0."""


def sum_up(
    sums: Sums[float],
    extremes: Extremes[float],
    episodes: EpisodeSums[float],
    counts_K: Tensor,
    *,
    has_reference: bool,
) -> Divergence:
    """Turn the sums over a batch into figures.

    Args:
        sums: Over tokens.
        extremes: Over tokens.
        episodes: Sums over episodes.
        counts_K: Tokens in each bin of the log-ratio. Shape [K].
        has_reference: Whether there is a reference policy, hence a KL to it.
    """
    if not sums.tokens:
        sums, extremes, episodes = ONE_ON_POLICY_TOKEN
    mean = Sums(*(value / sums.tokens for value in sums))
    sequence = EpisodeSums(*(value / episodes.episodes for value in episodes))
    lag0, lagged = sums.lag0, sums.tokens - sums.lag0
    return Divergence(
        ratio_mean=mean.ratio,
        ratio_std=_std(mean.ratio, mean.ratio_squared),
        ratio_max=extremes.ratio,
        ratio_percentiles=_ratio_percentiles(counts_K),
        log_ratio_histogram=histogram.in_few_bins(counts_K),
        lag0_tokens=int(lag0),
        lag0_ratio_mean=_mean(sums.lag0_ratio, lag0, of_none=1.0),
        lag0_ratio_max=extremes.lag0_ratio if lag0 else 1.0,
        lag0_logprob_diff_mean=_mean(sums.lag0_diff, lag0),
        lag0_logprob_diff_max=extremes.lag0_diff,
        lagged_ratio_mean=_mean(sums.lagged_ratio, lagged, of_none=1.0),
        lagged_logprob_diff_mean=_mean(sums.lagged_diff, lagged),
        lagged_logprob_diff_max=extremes.lagged_diff,
        effective_sample_size=_effective_share(mean.ratio, mean.ratio_squared),
        sequence_effective_sample_size=_effective_share(sequence.ratio, sequence.ratio_squared),
        sequence_ratio_mean=sequence.ratio,
        clip_fraction_low=mean.low,
        clip_fraction_high=mean.high,
        mask_fraction_low=mean.masked_low,
        mask_fraction_high=mean.masked_high,
        truncated_fraction=mean.truncated,
        kl_pi_mu_k1=mean.ratio_log,
        kl_pi_mu_k2=mean.ratio_log_squared / 2,
        kl_pi_mu_k3=mean.ratio_log - mean.ratio + 1,
        kl_mu_pi_k1=-mean.log,
        kl_mu_pi_k2=mean.log_squared / 2,
        kl_mu_pi_k3=mean.ratio - 1 - mean.log,
        kl_pi_ref_k1=mean.ref_k1 if has_reference else None,
        kl_pi_ref_k2=mean.ref_k2 if has_reference else None,
        kl_pi_ref_k3=mean.ref_k3 if has_reference else None,
        chi_square=mean.ratio_squared - 1,
        entropy=mean.entropy,
        advantage_mean=mean.advantage,
        advantage_std=_std(mean.advantage, mean.advantage_squared),
        advantage_min=-extremes.minus_advantage,
        advantage_max=extremes.advantage,
    )


def _ratio_percentiles(counts_K: Tensor) -> dict[str, float]:
    return {str(p): math.exp(histogram.percentile(counts_K, p)) for p in PERCENTS}


def _mean(total: float, count: float, *, of_none: float = 0.0) -> float:
    return total / count if count else of_none


def _std(mean: float, mean_square: float) -> float:
    return math.sqrt(max(0.0, mean_square - mean**2))  # rounding can make it negative


def _effective_share(mean: float, mean_square: float) -> float:
    return mean**2 / mean_square if mean_square else 0.0
