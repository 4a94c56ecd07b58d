"""Corrections: the importance weight of a token, and the tokens left out, from pi/mu.

With rho = pi/mu of a token (prox/mu where the surrogate is anchored at prox, see `losses.py`), its
product over an episode rho(1..T) and their geometric mean rho(1..T)^(1/T), a correction gives

    u      the ratio that takes rho's place; its gradient is u dlog(pi)
    keep   whether the token counts at all

A correction depends on ratios alone. A rule that depends on the sign of the advantage too, because
it only stops a token from going further out, is a trust region, hence a surrogate: PPO's clip, and
also the masks of M2PO and DPPO. V-trace truncates prox/mu as `tis` does, and has it in its
advantages: no correction weighs it again.

Everything is computed in log space: products of ratios overflow. Adding a correction = a function
here, a line in `CORRECTIONS`, and its name in `algorithm.correction`.

Shapes: N scored tokens (flat).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings

from .microbatch import Segments


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """Corrected ratios, and the tokens kept."""

    log_ratios_N: Tensor
    """log u, nats; its gradient is that of log(rho). Shape [N]."""
    keep_N: Tensor
    """Tokens that count. Shape [N], bool."""


Correction = Callable[[Tensor, Segments, AlgorithmSettings], Corrected]


def none(log_rhos_N: Tensor, _segments: Segments, _settings: AlgorithmSettings) -> Corrected:
    """Use the ratio as it is.

    Formula:
        u = rho

    Kind:
        token weight

    Use:
        With a trust region about mu (PPO), or for plain importance sampling. About prox it weighs
        nothing at all, so that prox/mu is dropped: refused where episodes may lag, unless
        `algorithm.ignore_behaviour` asks for it.

    Source:
        Schulman et al. 2017, arXiv:1707.06347.
    """
    return _keep_all(log_rhos_N)


def tis(log_rhos_N: Tensor, _segments: Segments, settings: AlgorithmSettings) -> Corrected:
    """Truncate the ratio of a token; a truncated token still has a gradient, of weight `rho_bar`.

    Formula:
        u = min(rho, rho_bar)

    Kind:
        token weight

    Use:
        The default. Bounds the case that PPO leaves open: a negative advantage with a large ratio.

    Source:
        Ionides 2008; Espeholt et al. 2018 (V-trace), arXiv:1802.01561, section 4.1;
        Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    return _keep_all(_truncate(log_rhos_N, settings))


def seq_tis(log_rhos_N: Tensor, segments: Segments, settings: AlgorithmSettings) -> Corrected:
    """Truncate the ratio of the whole episode, and give it to each of its tokens.

    Formula:
        u = min(rho(1..T), rho_bar)

    Kind:
        sequence weight

    Use:
        Short answers or small lags: prefixes are corrected as well, at a variance that grows with
        the length.

    Source:
        Liu et al. 2025, "When Speed Kills Stability"; verl, rollout correction.
    """
    ratio_N = segments.sum(log_rhos_N.detach()).clamp(max=math.log(settings.rho_bar))
    return _keep_all(_with_value(log_rhos_N, ratio_N))


def geo_tis(log_rhos_N: Tensor, segments: Segments, settings: AlgorithmSettings) -> Corrected:
    """Truncate the geometric mean of an episode's ratios, and give it to each of its tokens.

    Formula:
        u = min(rho(1..T)^(1/T), rho_bar)

    Kind:
        sequence weight

    Use:
        Long answers, where the product of `seq_tis` is nearly always 0 or truncated. Biased: it
        evens out the differences between tokens of one episode.

    Source:
        verl, rollout correction, `rollout_is_level: geometric`.
    """
    mean_N = segments.mean(log_rhos_N.detach()).clamp(max=math.log(settings.rho_bar))
    return _keep_all(_with_value(log_rhos_N, mean_N))


def mis(log_rhos_N: Tensor, _segments: Segments, settings: AlgorithmSettings) -> Corrected:
    """Leave out tokens whose ratio is out of bounds, on either side.

    Formula:
        u = rho;  keep = mask_low <= rho <= mask_high

    Kind:
        token mask

    Use:
        Large models, mixtures of experts: a ratio far out is more likely wrong than informative.

    Source:
        Ling Team 2025 (IcePop), "Every Step Evolves", arXiv:2510.18855; masked importance sampling
        in Liu et al. 2025, "When Speed Kills Stability".
    """
    return Corrected(log_rhos_N, _within(log_rhos_N, settings.mask_low, settings.mask_high))


def seq_mis(log_rhos_N: Tensor, segments: Segments, settings: AlgorithmSettings) -> Corrected:
    """Leave out episodes whose ratio is out of bounds, and give it to each token of the others.

    Formula:
        u = rho(1..T);  keep = mask_low <= rho(1..T) <= mask_high

    Kind:
        sequence mask

    Use:
        As `seq_tis`, where a truncated episode would rather be none.

    Source:
        Liu et al. 2025, "When Speed Kills Stability"; verl, rollout correction.
    """
    ratio_N = segments.sum(log_rhos_N.detach())
    keep_N = _within(ratio_N, settings.mask_low, settings.mask_high)
    return Corrected(_with_value(log_rhos_N, ratio_N), keep_N)


def geo_mask(log_rhos_N: Tensor, segments: Segments, settings: AlgorithmSettings) -> Corrected:
    """Leave out episodes whose geometric mean ratio is out of bounds; truncate those of tokens.

    Formula:
        u = min(rho, rho_bar);  keep = geo_low <= rho(1..T)^(1/T) <= geo_high

    Kind:
        sequence mask

    Use:
        Long answers: the mean does not drift with the length, as the product does.

    Source:
        verl, rollout correction, preset `decoupled_geo_rs_token_tis`.
    """
    mean_N = segments.mean(log_rhos_N.detach())
    keep_N = _within(mean_N, settings.geo_low, settings.geo_high)
    return Corrected(_truncate(log_rhos_N, settings), keep_N)


def token_veto(log_rhos_N: Tensor, segments: Segments, settings: AlgorithmSettings) -> Corrected:
    """Leave out episodes in which one token has all but vanished from pi; truncate the others.

    Formula:
        u = min(rho, rho_bar);  keep = min over 1..T of rho >= veto

    Kind:
        sequence mask

    Use:
        Where engine and learner may disagree outright on a token.

    Source:
        verl, rollout correction, `rollout_token_veto_threshold`.
    """
    vetoed_N = segments.any(log_rhos_N.detach() < math.log(settings.veto))
    return Corrected(_truncate(log_rhos_N, settings), ~vetoed_N)


CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "tis": tis,
    "seq_tis": seq_tis,
    "geo_tis": geo_tis,
    "mis": mis,
    "icepop": mis,
    "seq_mis": seq_mis,
    "geo_mask": geo_mask,
    "token_veto": token_veto,
}


OF_TOKENS = frozenset({"none", "tis", "mis", "icepop"})
"""Those whose value at a token depends on that token alone."""


def _keep_all(log_ratios_N: Tensor) -> Corrected:
    return Corrected(log_ratios_N, torch.ones_like(log_ratios_N, dtype=torch.bool))


def _truncate(log_rhos_N: Tensor, settings: AlgorithmSettings) -> Tensor:
    return _with_value(log_rhos_N, log_rhos_N.detach().clamp(max=math.log(settings.rho_bar)))


def _with_value(log_rhos_N: Tensor, values_N: Tensor) -> Tensor:
    """Replace the values, and keep the gradient of log(rho): du = u dlog(pi)."""
    return values_N + (log_rhos_N - log_rhos_N.detach())


def _within(log_ratios_N: Tensor, low: float, high: float) -> Tensor:
    ratios_N = log_ratios_N.detach().exp()
    return (low <= ratios_N) & (ratios_N <= high)
