"""How far the target policy has moved from the behaviour policy, over one batch.

Each microbatch adds sums, extremes and counts; ranks are merged once, at the end of the batch.
Tokens weigh alike, so the figures do not depend on how the batch was cut: an episode is never cut.

All expectations are over tokens that mu sampled. Those under pi weigh a token with rho = pi/mu,
given its prefix; that prefixes are mu's as well is what the sequence's figures tell.

Shapes: N scored tokens of a microbatch (flat), B its episodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings

from . import histogram
from .batch import Microbatch
from .ranks import Ranks

T = TypeVar("T")

PERCENTS = (1, 5, 25, 50, 75, 95, 99)


@dataclass(frozen=True, slots=True)
class Divergence:
    """pi against mu over the trained tokens of one batch; no token counts as pi = mu."""

    ratio_mean: float
    """Mean of rho = pi/mu; 1 in expectation as long as mu covers pi."""
    ratio_std: float
    ratio_max: float
    """Largest rho."""
    ratio_percentiles: dict[str, float]
    """Percent -> rho, within 5 % of its log."""
    lag0_tokens: int
    """Trained tokens at lag 0, where pi = mu: what differs there is numerics alone."""
    lag0_ratio_mean: float
    """Mean rho at lag 0."""
    lag0_ratio_max: float
    """Largest rho at lag 0."""
    lag0_logprob_diff_mean: float
    """Mean |log pi - log mu| at lag 0, nats: the engine's rounding against the learner's."""
    lag0_logprob_diff_max: float
    """Largest |log pi - log mu| at lag 0, nats."""
    lagged_ratio_mean: float
    """Mean rho at lag 1 and above: numerics and the way pi has gone since."""
    lagged_logprob_diff_mean: float
    """Mean |log pi - log mu| at lag 1 and above, nats."""
    lagged_logprob_diff_max: float
    """Largest |log pi - log mu| at lag 1 and above, nats."""
    effective_sample_size: float
    """(sum rho)^2 / (N sum rho^2), in (0, 1]: the share of tokens that still carry information."""
    sequence_effective_sample_size: float
    """The same of whole episodes, whose ratio is the product over their tokens."""
    sequence_ratio_mean: float
    """Mean over episodes of that product."""
    clip_fraction_low: float
    """Share of tokens whose gradient stopped at 1 - clip_low (negative advantages)."""
    clip_fraction_high: float
    """Share of tokens whose gradient stopped at 1 + clip_high (positive advantages)."""
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
    chi_square: float
    """chi^2(pi || mu) per token: mean of rho^2 - 1, how much the ratios add to the variance."""
    entropy: float
    """Mean entropy of pi at the sampling temperature, nats."""
    advantage_mean: float
    """Over trained tokens, as is all that follows."""
    advantage_std: float
    advantage_min: float
    advantage_max: float


class Sums(NamedTuple, Generic[T]):
    """What is added up over tokens: first the terms, at the end their sums."""

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
    truncated: T
    entropy: T
    advantage: T
    advantage_squared: T


class Extremes(NamedTuple, Generic[T]):
    """What the largest is kept of."""

    ratio: T
    lag0_ratio: T
    lag0_diff: T
    lagged_diff: T
    advantage: T
    minus_advantage: T


class EpisodeSums(NamedTuple, Generic[T]):
    """What is added up over episodes, with the ratio of a whole one."""

    episodes: T
    ratio: T
    ratio_squared: T


class DivergenceMeter:
    """Accumulates a `Divergence`, on the device, without waiting for it."""

    def __init__(self, settings: AlgorithmSettings, device: torch.device) -> None:
        self._settings = settings
        zeros = torch.zeros(len(Sums._fields), dtype=torch.float64, device=device)
        self._sums = zeros
        self._extremes = zeros.new_full((len(Extremes._fields),), -torch.inf)
        self._episodes = zeros.new_zeros(len(EpisodeSums._fields))
        self._counts_K = zeros.new_zeros(histogram.NUM_BINS, dtype=torch.int64)

    @torch.no_grad()
    def add(self, log_rhos_N: Tensor, entropies_N: Tensor, microbatch: Microbatch) -> None:
        """Count one microbatch.

        Args:
            log_rhos_N: log(pi/mu) of its tokens, nats. Shape [N].
            entropies_N: Of pi, nats. Shape [N].
            microbatch: Whose tokens they are.
        """
        if not len(log_rhos_N):
            return
        # Beyond this a ratio is as good as infinite, and its square would be.
        log_rhos_N = log_rhos_N.double().clamp(-histogram.WIDEST, histogram.WIDEST)
        terms = self._terms(log_rhos_N, entropies_N, microbatch)
        self._sums += torch.stack([term_N.double().sum() for term_N in terms])
        values = _values(log_rhos_N, microbatch)
        largest = torch.stack([values_N.double().max() for values_N in values])
        self._extremes = torch.maximum(self._extremes, largest)
        self._episodes += torch.stack(list(_episode_sums(log_rhos_N, microbatch)))
        self._counts_K += histogram.count(log_rhos_N)

    def merge(self, ranks: Ranks) -> Divergence:
        """Merge all ranks; every rank must call it."""
        sums = Sums[float](*ranks.sum(self._sums).tolist())
        extremes = Extremes[float](*ranks.maximum(self._extremes).tolist())
        episodes = EpisodeSums[float](*ranks.sum(self._episodes).tolist())
        return _divergence(sums, extremes, episodes, ranks.sum(self._counts_K))

    def _terms(
        self, log_rhos_N: Tensor, entropies_N: Tensor, microbatch: Microbatch
    ) -> Sums[Tensor]:
        settings, advantages_N = self._settings, microbatch.advantages_N.double()
        rhos_N, diffs_N = log_rhos_N.exp(), log_rhos_N.abs()
        lag0_N = microbatch.lags_N == 0
        # Without a trust region nothing is ever clipped.
        is_clip = settings.surrogate == "clip"
        return Sums(
            tokens=torch.ones_like(rhos_N),
            ratio=rhos_N,
            ratio_squared=rhos_N.square(),
            ratio_log=rhos_N * log_rhos_N,
            ratio_log_squared=rhos_N * log_rhos_N.square(),
            log=log_rhos_N,
            log_squared=log_rhos_N.square(),
            lag0=lag0_N,
            lag0_ratio=rhos_N * lag0_N,
            lag0_diff=diffs_N * lag0_N,
            lagged_ratio=rhos_N * ~lag0_N,
            lagged_diff=diffs_N * ~lag0_N,
            low=(rhos_N < 1 - settings.clip_low) & (advantages_N < 0) & is_clip,
            high=(rhos_N > 1 + settings.clip_high) & (advantages_N > 0) & is_clip,
            truncated=rhos_N > settings.rho_bar,
            entropy=entropies_N,
            advantage=advantages_N,
            advantage_squared=advantages_N.square(),
        )


def _values(log_rhos_N: Tensor, microbatch: Microbatch) -> Extremes[Tensor]:
    rhos_N, diffs_N = log_rhos_N.exp(), log_rhos_N.abs()
    lag0_N = microbatch.lags_N == 0
    return Extremes(
        ratio=rhos_N,
        lag0_ratio=rhos_N * lag0_N,
        lag0_diff=diffs_N * lag0_N,
        lagged_diff=diffs_N * ~lag0_N,
        advantage=microbatch.advantages_N,
        minus_advantage=-microbatch.advantages_N,
    )


def _episode_sums(log_rhos_N: Tensor, microbatch: Microbatch) -> EpisodeSums[Tensor]:
    """Multiply the ratios of each episode; one without a trained token does not count."""
    log_ratios_B = torch.zeros_like(microbatch.rewards_B, dtype=torch.float64)
    log_ratios_B.index_add_(0, microbatch.episodes_N, log_rhos_N)
    counts_B = torch.zeros_like(log_ratios_B).index_fill_(0, microbatch.episodes_N, 1.0)
    ratios_B = log_ratios_B.clamp(-histogram.WIDEST, histogram.WIDEST).exp() * counts_B
    return EpisodeSums(counts_B.sum(), ratios_B.sum(), ratios_B.square().sum())


def _divergence(
    sums: Sums[float], extremes: Extremes[float], episodes: EpisodeSums[float], counts_K: Tensor
) -> Divergence:
    """Turn sums over tokens and episodes into means."""
    if not sums.tokens:  # as if one token with pi = mu and advantage 0 had been trained
        sums = sums._replace(tokens=1.0, ratio=1.0, ratio_squared=1.0)
        extremes = Extremes(1.0, *[0.0] * (len(extremes) - 1))
        episodes = EpisodeSums(1.0, 1.0, 1.0)
    mean = Sums[float](*(value / sums.tokens for value in sums))
    lag0, lagged = sums.lag0, sums.tokens - sums.lag0
    return Divergence(
        ratio_mean=mean.ratio,
        ratio_std=_std(mean.ratio, mean.ratio_squared),
        ratio_max=extremes.ratio,
        ratio_percentiles={
            str(percent): math.exp(histogram.percentile(counts_K, percent)) for percent in PERCENTS
        },
        lag0_tokens=int(lag0),
        lag0_ratio_mean=sums.lag0_ratio / lag0 if lag0 else 1.0,
        lag0_ratio_max=extremes.lag0_ratio if lag0 else 1.0,
        lag0_logprob_diff_mean=sums.lag0_diff / lag0 if lag0 else 0.0,
        lag0_logprob_diff_max=extremes.lag0_diff,
        lagged_ratio_mean=sums.lagged_ratio / lagged if lagged else 1.0,
        lagged_logprob_diff_mean=sums.lagged_diff / lagged if lagged else 0.0,
        lagged_logprob_diff_max=extremes.lagged_diff,
        effective_sample_size=_effective_share(mean.ratio, mean.ratio_squared),
        sequence_effective_sample_size=_effective_share(
            episodes.ratio / episodes.episodes, episodes.ratio_squared / episodes.episodes
        ),
        sequence_ratio_mean=episodes.ratio / episodes.episodes,
        clip_fraction_low=mean.low,
        clip_fraction_high=mean.high,
        truncated_fraction=mean.truncated,
        kl_pi_mu_k1=mean.ratio_log,
        kl_pi_mu_k2=mean.ratio_log_squared / 2,
        kl_pi_mu_k3=mean.ratio_log - mean.ratio + 1,
        kl_mu_pi_k1=-mean.log,
        kl_mu_pi_k2=mean.log_squared / 2,
        kl_mu_pi_k3=mean.ratio - 1 - mean.log,
        chi_square=mean.ratio_squared - 1,
        entropy=mean.entropy,
        advantage_mean=mean.advantage,
        advantage_std=_std(mean.advantage, mean.advantage_squared),
        advantage_min=-extremes.minus_advantage,
        advantage_max=extremes.advantage,
    )


def _std(mean: float, mean_square: float) -> float:
    return math.sqrt(max(0.0, mean_square - mean**2))  # rounding can make it negative


def _effective_share(mean: float, mean_square: float) -> float:
    return mean**2 / mean_square if mean_square else 0.0
