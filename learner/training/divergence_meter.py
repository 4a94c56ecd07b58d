"""Measurement of a batch's divergence of the target policy from the behaviour policy.

Each microbatch adds sums, extremes and counts; ranks are merged once, at the end of the batch.
Tokens weigh alike, so the figures do not depend on how the batch was cut: an episode is never cut.

All expectations are over tokens that mu sampled. Those under pi weigh a token with rho = pi/mu,
given its prefix, which is a sample of mu too: only the figures of whole episodes account for that.

Shapes: N scored tokens of a microbatch (flat), B its episodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.losses import PolicyLoss
from learner.algorithm.microbatch import Microbatch
from learner.algorithm.reference_kl import ESTIMATORS
from learner.model.ranks import Ranks

from . import histogram
from .divergence import Divergence, EpisodeSums, Extremes, Sums, sum_up


class DivergenceMeter:
    """Accumulates a `Divergence` on the device, without synchronising with it."""

    def __init__(self, settings: AlgorithmSettings, device: torch.device) -> None:
        self._settings = settings
        zeros = torch.zeros(len(Sums._fields), dtype=torch.float64, device=device)
        self._sums = zeros
        self._extremes = zeros.new_full((len(Extremes._fields),), -torch.inf)
        self._episodes = zeros.new_zeros(len(EpisodeSums._fields))
        self._counts_K = zeros.new_zeros(histogram.NUM_BINS, dtype=torch.int64)
        self._has_moved = False

    @torch.no_grad()
    def add(
        self,
        log_rhos_N: Tensor,
        entropies_N: Tensor,
        microbatch: Microbatch,
        found: PolicyLoss,
        deltas_N: Tensor | None = None,
    ) -> None:
        """Count one microbatch.

        Args:
            log_rhos_N: log(pi/mu) of its tokens, nats. Shape [N].
            entropies_N: Of pi, nats. Shape [N].
            microbatch: The microbatch of these tokens.
            found: The loss, with the tokens that bounds and masks acted on.
            deltas_N: log(pi/ref), nats; None without a reference. Shape [N].
        """
        if not len(log_rhos_N):
            return
        # Beyond this bound a ratio is practically infinite, and its square would overflow.
        log_rhos_N = log_rhos_N.double().clamp(-histogram.WIDEST, histogram.WIDEST)
        terms = self._terms(log_rhos_N, entropies_N, microbatch, found, deltas_N)
        self._sums += torch.stack([term_N.double().sum() for term_N in terms])
        values = _values(log_rhos_N, microbatch, self._is_lag0(microbatch))
        largest = torch.stack([values_N.double().max() for values_N in values])
        self._extremes = torch.maximum(self._extremes, largest)
        self._episodes += torch.stack(list(_episode_sums(log_rhos_N, microbatch)))
        self._counts_K += histogram.count(log_rhos_N)

    def policy_moved(self) -> None:
        """Note an optimizer step: from now on pi = mu for no token of this batch."""
        self._has_moved = True

    def merge(self, ranks: Ranks) -> Divergence:
        """Merge all ranks; every rank must call it."""
        sums = Sums[float](*ranks.sum(self._sums).tolist())
        extremes = Extremes[float](*ranks.maximum(self._extremes).tolist())
        episodes = EpisodeSums[float](*ranks.sum(self._episodes).tolist())
        return sum_up(
            sums,
            extremes,
            episodes,
            ranks.sum(self._counts_K),
            has_reference=self._settings.kl_coefficient > 0,
        )

    def _is_lag0(self, microbatch: Microbatch) -> Tensor:
        return (microbatch.lags_N == 0) & (not self._has_moved)

    def _terms(
        self,
        log_rhos_N: Tensor,
        entropies_N: Tensor,
        microbatch: Microbatch,
        found: PolicyLoss,
        deltas_N: Tensor | None,
    ) -> Sums[Tensor]:
        advantages_N = microbatch.advantages_N.double()
        rhos_N, diffs_N = log_rhos_N.exp(), log_rhos_N.abs()
        refs_N = torch.zeros_like(rhos_N) if deltas_N is None else deltas_N.double()
        lag0_N = self._is_lag0(microbatch)
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
            low=found.low_N,
            high=found.high_N,
            masked_low=~found.kept_N & (log_rhos_N < 0),
            masked_high=~found.kept_N & (log_rhos_N >= 0),
            truncated=rhos_N > self._settings.rho_bar,
            ref_k1=rhos_N * ESTIMATORS["k1"](refs_N),
            ref_k2=rhos_N * ESTIMATORS["k2"](refs_N),
            ref_k3=rhos_N * ESTIMATORS["k3"](refs_N),
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
    ratios_B = log_ratios_B.clamp(-histogram.WIDEST, histogram.WIDEST).exp() * counts_B
    return EpisodeSums(counts_B.sum(), ratios_B.sum(), ratios_B.square().sum())
