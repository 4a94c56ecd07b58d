"""How far the target policy has moved from the behaviour policy, over one batch.

Each microbatch adds sums and maxima; ranks are merged once, at the end of the batch. Token counts
weigh, so the figures do not depend on how the batch was cut.

Shapes: N scored tokens of a microbatch (flat).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings

from .ranks import Ranks


@dataclass(frozen=True, slots=True)
class Divergence:
    """pi against mu over the trained tokens of one batch; no token counts as pi = mu."""

    ratio_mean: float
    """Mean of rho = pi/mu; 1 in expectation as long as mu covers pi."""
    ratio_max: float
    """Largest rho."""
    lag0_ratio_mean: float
    """Mean rho of tokens at lag 0, where pi = mu: its distance from 1 is numerics alone."""
    lag0_ratio_max: float
    """Largest rho at lag 0."""
    lag0_logprob_diff_max: float
    """Largest |log pi - log mu| at lag 0, nats."""
    lag0_tokens: int
    """Trained tokens at lag 0."""
    effective_sample_size: float
    """(sum rho)^2 / (N sum rho^2), in (0, 1]: the share of tokens that still carry information."""
    clip_fraction_low: float
    """Share of tokens whose gradient stopped at 1 - clip_low (negative advantages)."""
    clip_fraction_high: float
    """Share of tokens whose gradient stopped at 1 + clip_high (positive advantages)."""
    truncated_fraction: float
    """Share of tokens with rho > rho_bar."""
    kl: float
    """KL(pi || mu) per token, nats: mean of rho log(rho) - rho + 1, unbiased, never negative."""
    entropy: float
    """Mean entropy of pi at the sampling temperature, nats."""


class DivergenceMeter:
    """Accumulates a `Divergence`, on the device, without waiting for it."""

    def __init__(self, settings: AlgorithmSettings, device: torch.device) -> None:
        self._settings = settings
        self._sums = torch.zeros(10, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self, log_rhos_N: Tensor, advantages_N: Tensor, entropies_N: Tensor, lags_N: Tensor
    ) -> None:
        """Count one microbatch."""
        if not len(log_rhos_N):
            return
        settings = self._settings
        log_rhos_N = log_rhos_N.double()
        rhos_N = log_rhos_N.exp()
        lag0_N = lags_N == 0
        # Without a trust region nothing is ever clipped.
        is_clip = settings.surrogate == "clip"
        low_N = (rhos_N < 1 - settings.clip_low) & (advantages_N < 0) & is_clip
        high_N = (rhos_N > 1 + settings.clip_high) & (advantages_N > 0) & is_clip
        terms = [
            torch.ones_like(rhos_N),
            rhos_N,
            rhos_N.square(),
            rhos_N * log_rhos_N - rhos_N + 1,
            entropies_N,
            low_N,
            high_N,
            rhos_N > settings.rho_bar,
            lag0_N,
            rhos_N * lag0_N,
        ]
        self._sums += torch.stack([term.double().sum() for term in terms])
        maxima = torch.stack(
            [rhos_N.max(), (rhos_N * lag0_N).max(), (log_rhos_N.abs() * lag0_N).max()]
        )
        self._maxima = torch.maximum(self._maxima, maxima)

    def merge(self, ranks: Ranks) -> Divergence:
        """Merge all ranks; every rank must call it."""
        sums, maxima = ranks.sum(self._sums).tolist(), ranks.maximum(self._maxima).tolist()
        num, rho, rho_squared, kl, entropy, low, high, truncated, lag0, lag0_rho = sums
        if not num:
            return Divergence(1.0, 1.0, 1.0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return Divergence(
            ratio_mean=rho / num,
            ratio_max=maxima[0],
            lag0_ratio_mean=lag0_rho / lag0 if lag0 else 1.0,
            lag0_ratio_max=maxima[1] if lag0 else 1.0,
            lag0_logprob_diff_max=maxima[2],
            lag0_tokens=int(lag0),
            effective_sample_size=rho**2 / (num * rho_squared) if rho_squared else 0.0,
            clip_fraction_low=low / num,
            clip_fraction_high=high / num,
            truncated_fraction=truncated / num,
            kl=kl / num,
            entropy=entropy / num,
        )
