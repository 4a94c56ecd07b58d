"""Figures of a batch's divergence of pi from mu, from sums over tokens and episodes.

Owns names and meanings of the figures, and adds up the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.losses import PolicyLoss
from learner.algorithm.microbatch import Microbatch
from learner.algorithm.reference_kl import ESTIMATORS
from learner.model.ranks import Ranks

from . import ratio_bins

# --------------------------------------------------------------------------------------------------
# Percentiles and a short histogram of log-ratios from counts in fixed bins.
#
# Counts are integers, so they add up to the same over any cut into microbatches and ranks, in any
# order: what is read from them is deterministic, and cost one small sum over ranks.
#
# Bins are equally wide in asinh(x / FINE): near zero as wide as FINE / 20, further out 5 % of x.
# That resolves rounding noise of 1e-6 nats, drift of 0.1 and a token that mu never expected alike.
#
# Shapes: N tokens, K bins.

FINE = 1e-4  # nats: where bins go from absolute to relative width
WIDEST = 300.0  # nats: exp of twice as much is still a float64
BINS_PER_UNIT = 20
HALF = math.ceil(math.asinh(WIDEST / FINE) * BINS_PER_UNIT)
NUM_BINS = 2 * HALF + 1


def count(values_N: Tensor) -> Tensor:
    """Count values into bins, the middle one around zero; shape [K], int64."""
    scaled_N = torch.asinh(values_N.double() / FINE) * BINS_PER_UNIT
    bins_N = scaled_N.round().nan_to_num(nan=HALF).clamp(-HALF, HALF).long() + HALF
    counts_K = torch.zeros(NUM_BINS, dtype=torch.int64, device=values_N.device)
    return counts_K.scatter_add_(0, bins_N, torch.ones_like(bins_N))


def percentile(counts_K: Tensor, percent: float) -> float:
    """Return the middle of the bin that holds the value of rank ceil(percent * n / 100).

    Args:
        counts_K: Sum of results of `count`. Shape [K].
        percent: Percentage, in [0, 100].

    Returns:
        The value in nats; 0 where nothing was counted.
    """
    total = int(counts_K.sum())
    if not total:
        return 0.0
    rank = max(1, math.ceil(percent * total / 100))
    index = int(torch.searchsorted(counts_K.cumsum(0), rank))
    return _middle(index)


def in_few_bins(counts_K: Tensor) -> dict[str, int]:
    """Add up bins to those of `ratio_bins`, each by the value in its middle.

    Args:
        counts_K: Sum of results of `count`. Shape [K].

    Returns:
        Each name of `ratio_bins.NAMES` -> values. One that is within 2.5 % of an edge may be
        counted on its other side.
    """
    few = dict.fromkeys(ratio_bins.NAMES, 0)
    for index, counted in enumerate(counts_K.tolist()):
        if counted:
            few[ratio_bins.name_of(_middle(index))] += counted
    return few


def _middle(index: int) -> float:
    return FINE * math.sinh((index - HALF) / BINS_PER_UNIT)


# --------------------------------------------------------------------------------------------------
# Figures of a batch's divergence of pi from mu, from sums over tokens and episodes.

T = TypeVar("T")
"""`Tensor` for the terms of tokens, `float` for the sums over a batch."""

PERCENTS = (1, 5, 25, 50, 75, 95, 99)


@dataclass(frozen=True, slots=True)
class Divergence:
    """pi against mu over the trained tokens of one batch; without any, as if pi were mu.

    docs/metrics.md has the meaning of each figure.
    """

    ratio_mean: float
    ratio_std: float
    ratio_max: float
    ratio_percentiles: dict[str, float]
    log_ratio_histogram: dict[str, int]
    lag0_tokens: int
    lag0_ratio_mean: float
    lag0_ratio_max: float
    lag0_logprob_diff_mean: float
    lag0_logprob_diff_max: float
    lag0_temperature_excess: float
    lag0_temperature_weight: float
    lagged_ratio_mean: float
    lagged_logprob_diff_mean: float
    lagged_logprob_diff_max: float
    effective_sample_size: float
    sequence_effective_sample_size: float
    sequence_ratio_mean: float
    clip_fraction_low: float
    clip_fraction_high: float
    mask_fraction_low: float
    mask_fraction_high: float
    truncated_fraction: float
    kl_pi_mu_k1: float
    kl_pi_mu_k2: float
    kl_pi_mu_k3: float
    kl_mu_pi_k1: float
    kl_mu_pi_k2: float
    kl_mu_pi_k3: float
    kl_pi_ref_k1: float | None
    kl_pi_ref_k2: float | None
    kl_pi_ref_k3: float | None
    chi_square: float
    entropy: float
    advantage_mean: float
    advantage_std: float
    advantage_min: float
    advantage_max: float
    teacher_kl: float | None = None


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
    lag0_lean: T
    """log(rho) (log(pi) + entropy)."""
    lag0_spread: T
    """(log(pi) + entropy)^2."""
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
    taught: T
    """Tokens with a teacher."""
    teacher: T
    """rho log(pi/teacher) of these."""
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
        sums: Over tokens, of which there is one at least.
        extremes: Over tokens.
        episodes: Sums over episodes.
        counts_K: Tokens in each bin of the log-ratio. Shape [K].
        has_reference: Whether there is a reference policy, hence a KL to it.
    """
    mean = Sums(*(value / sums.tokens for value in sums))
    sequence = EpisodeSums(*(value / episodes.episodes for value in episodes))
    lag0, lagged = sums.lag0, sums.tokens - sums.lag0
    return Divergence(
        ratio_mean=mean.ratio,
        ratio_std=_std(mean.ratio, mean.ratio_squared),
        ratio_max=extremes.ratio,
        ratio_percentiles=_ratio_percentiles(counts_K),
        log_ratio_histogram=in_few_bins(counts_K),
        lag0_tokens=int(lag0),
        lag0_ratio_mean=_mean(sums.lag0_ratio, lag0, of_none=1.0),
        lag0_ratio_max=extremes.lag0_ratio if lag0 else 1.0,
        lag0_logprob_diff_mean=_mean(sums.lag0_diff, lag0),
        lag0_logprob_diff_max=extremes.lag0_diff,
        lag0_temperature_excess=_mean(sums.lag0_lean, sums.lag0_spread),
        lag0_temperature_weight=sums.lag0_spread,
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
    return {str(p): math.exp(percentile(counts_K, p)) for p in PERCENTS}


def _mean(total: float, count: float, *, of_none: float = 0.0) -> float:
    return total / count if count else of_none


def _std(mean: float, mean_square: float) -> float:
    return math.sqrt(max(0.0, mean_square - mean**2))  # rounding can make it negative


def _effective_share(mean: float, mean_square: float) -> float:
    return mean**2 / mean_square if mean_square else 0.0


# --------------------------------------------------------------------------------------------------
# Measurement of a batch's divergence of the target policy from the behaviour policy.
#
# Each microbatch adds sums, extremes and counts; ranks are merged once, at the end of the batch.
# Tokens weigh alike, so the figures do not depend on how the batch was cut: an episode is never
# cut.
#
# All expectations are over tokens that mu sampled. Those under pi weigh a token with rho = pi/mu,
# given its prefix, which is a sample of mu too: only the figures of whole episodes account for
# that.
#
# Shapes: N scored tokens of a microbatch (flat), B its episodes.


class DivergenceMeter:
    """Accumulates a `Divergence` on the device, without synchronising with it."""

    def __init__(self, settings: AlgorithmSettings, device: torch.device) -> None:
        self._settings = settings
        zeros = torch.zeros(len(Sums._fields), dtype=torch.float64, device=device)
        self._sums = zeros
        self._extremes = zeros.new_full((len(Extremes._fields),), -torch.inf)
        self._episodes = zeros.new_zeros(len(EpisodeSums._fields))
        self._counts_K = zeros.new_zeros(NUM_BINS, dtype=torch.int64)
        self._has_moved = False

    @torch.no_grad()
    def add(
        self,
        log_rhos_N: Tensor,
        entropies_N: Tensor,
        microbatch: Microbatch,
        loss: PolicyLoss,
        deltas_N: Tensor | None = None,
        *,
        from_teacher_N: Tensor | None = None,
    ) -> None:
        """Add the terms of one microbatch.

        Args:
            log_rhos_N: log(pi/mu) of the tokens, nats. Shape [N].
            entropies_N: Entropy of pi at each token, nats. Shape [N].
            microbatch: The microbatch of these tokens.
            loss: The loss, with the tokens that bounds and masks acted on.
            deltas_N: log(pi/ref), nats; None without a reference. Shape [N].
            from_teacher_N: log(pi/teacher), nats, NaN where a token has no teacher; None without
                teachers. Shape [N].
        """
        if not len(log_rhos_N):
            return
        # Beyond this bound a ratio is practically infinite, and its square would overflow.
        log_rhos_N = log_rhos_N.double().clamp(-WIDEST, WIDEST)
        terms = self._terms(
            log_rhos_N, entropies_N, microbatch, loss, deltas_N, from_teacher_N=from_teacher_N
        )
        self._sums += torch.stack([term_N.double().sum() for term_N in terms])
        values = _values(log_rhos_N, microbatch, self._is_lag0(microbatch))
        largest = torch.stack([values_N.double().max() for values_N in values])
        self._extremes = torch.maximum(self._extremes, largest)
        self._episodes += torch.stack(list(_episode_sums(log_rhos_N, microbatch)))
        self._counts_K += count(log_rhos_N)

    def policy_moved(self) -> None:
        """Note an optimizer step: from now on pi differs from mu at all tokens of this batch."""
        self._has_moved = True

    def merge(self, ranks: Ranks) -> Divergence:
        """Merge all ranks; every rank must call it."""
        sums = Sums[float](*ranks.sum(self._sums).tolist())
        extremes = Extremes[float](*ranks.maximum(self._extremes).tolist())
        episodes = EpisodeSums[float](*ranks.sum(self._episodes).tolist())
        if not sums.tokens:
            sums, extremes, episodes = ONE_ON_POLICY_TOKEN
        figures = sum_up(
            sums,
            extremes,
            episodes,
            ranks.sum(self._counts_K),
            has_reference=self._settings.kl_coefficient > 0,
        )
        if not sums.taught:
            return figures
        return replace(figures, teacher_kl=sums.teacher / sums.taught)

    def _is_lag0(self, microbatch: Microbatch) -> Tensor:
        """Mark the tokens of episodes that pi sampled from first to last.

        A token after a swap in the midst of its episode was sampled over keys and values of older
        weights (`actors.kv_on_swap`), so that pi is not its mu, whatever its version.
        """
        is_new_B = microbatch.oldest_lags_B == 0
        return is_new_B[microbatch.episodes_N] & (not self._has_moved)

    def _terms(
        self,
        log_rhos_N: Tensor,
        entropies_N: Tensor,
        microbatch: Microbatch,
        loss: PolicyLoss,
        deltas_N: Tensor | None,
        *,
        from_teacher_N: Tensor | None,
    ) -> Sums[Tensor]:
        advantages_N = microbatch.advantages_N.double()
        rhos_N, diffs_N = log_rhos_N.exp(), log_rhos_N.abs()
        refs_N = torch.zeros_like(rhos_N) if deltas_N is None else deltas_N.double()
        if from_teacher_N is None:
            from_teacher_N = torch.full_like(rhos_N, math.nan)
        lag0_N = self._is_lag0(microbatch)
        # To sample at another temperature is to multiply logits, and log pi moves by this for each
        # share of them.
        lean_N = microbatch.behaviour_logprobs_N.double() + log_rhos_N + entropies_N.double()
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
            lag0_lean=log_rhos_N * lean_N * lag0_N,
            lag0_spread=lean_N.square() * lag0_N,
            lagged_ratio=rhos_N * ~lag0_N,
            lagged_diff=diffs_N * ~lag0_N,
            low=loss.low_N,
            high=loss.high_N,
            masked_low=~loss.kept_N & (log_rhos_N < 0),
            masked_high=~loss.kept_N & (log_rhos_N >= 0),
            truncated=rhos_N > self._settings.rho_bar,
            ref_k1=rhos_N * ESTIMATORS["k1"](refs_N),
            ref_k2=rhos_N * ESTIMATORS["k2"](refs_N),
            ref_k3=rhos_N * ESTIMATORS["k3"](refs_N),
            taught=~from_teacher_N.isnan(),
            teacher=torch.where(from_teacher_N.isnan(), 0.0, rhos_N * from_teacher_N.double()),
            entropy=entropies_N,
            advantage=advantages_N,
            advantage_squared=advantages_N.square(),
        )


def _values(log_rhos_N: Tensor, microbatch: Microbatch, lag0_N: Tensor) -> Extremes[Tensor]:
    rhos_N, diffs_N = log_rhos_N.exp(), log_rhos_N.abs()
    return Extremes(
        ratio=rhos_N,
        lag0_ratio=rhos_N * lag0_N,
        lag0_diff=diffs_N * lag0_N,
        lagged_diff=diffs_N * ~lag0_N,
        advantage=microbatch.advantages_N,
        minus_advantage=-microbatch.advantages_N,
    )


def _episode_sums(log_rhos_N: Tensor, microbatch: Microbatch) -> EpisodeSums[Tensor]:
    """Sum the ratios of whole episodes; one without a trained token does not count."""
    log_ratios_B = torch.zeros_like(microbatch.rewards_B, dtype=torch.float64)
    log_ratios_B.index_add_(0, microbatch.episodes_N, log_rhos_N)
    counts_B = torch.zeros_like(log_ratios_B).index_fill_(0, microbatch.episodes_N, 1.0)
    ratios_B = log_ratios_B.clamp(-WIDEST, WIDEST).exp() * counts_B
    return EpisodeSums(counts_B.sum(), ratios_B.sum(), ratios_B.square().sum())
