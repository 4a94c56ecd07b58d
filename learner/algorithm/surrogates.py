"""Surrogates: the objective of a token, and the trust region that stops it.

With r = pi/anchor the surrogate's ratio, A the advantage, sg = stop-gradient, and
T tokens in the episode:

    S(r, A)   the objective of a token
    low       tokens that the trust region's lower bound acts on (A < 0, r far below 1)
    high      tokens that its upper bound acts on (A > 0, r far above 1)

Every surrogate has the gradient A dlog(pi) at r = 1. Those of whole episodes are written token by
token with the same gradient, so that one aggregation serves all: with `sequence`, the sum over an
episode of (1/T) S(r, A) has the gradient of the paper's S(r(1..T), A).

Masks that depend on the sign of the advantage are here, because they are trust regions: M2PO and
DPPO stop tokens that would go further out, as PPO's clip does, with another measure of distance.

Adding one = a function here, a line in `SURROGATES`, and its name in `algorithm.surrogate`.

Shapes: N scored tokens (flat).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings

from .microbatch import Segments


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Arguments of a surrogate."""

    log_ratios_N: Tensor
    """log r, nats, with gradient through log pi. Shape [N]."""
    advantages_N: Tensor
    """Shape [N]."""
    log_pi_N: Tensor
    """nats, without gradient. Shape [N]."""
    log_anchor_N: Tensor
    """nats. Shape [N]."""
    segments: Segments
    log_ratio_bound: float
    """Largest |log r| that M2PO leaves in this optimizer step, nats."""


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """The quantity that is maximised, and the tokens that a bound acts on, once they are asked for.

    A loss alone needs none of them, and is computed for every chunk of logits.
    """

    values_N: Tensor
    """With gradient. Shape [N]."""
    outside: Callable[[], tuple[Tensor, Tensor]]
    """Finds the tokens that the lower bound acts on, and those of the upper. Shapes [N], bool."""


Surrogate = Callable[[Terms, AlgorithmSettings], Objective]


def reinforce(terms: Terms, _settings: AlgorithmSettings) -> Objective:
    """Weigh the policy gradient with the ratio, without a trust region.

    Formula:
        S = r A

    Kind:
        token

    Use:
        With a correction that bounds the ratio (V-trace, TIS), and one optimizer step per batch.

    Source:
        Williams 1992; the baseline is in the advantage.
    """
    never_N = torch.zeros_like(terms.log_ratios_N, dtype=torch.bool)
    return Objective(terms.log_ratios_N.exp() * terms.advantages_N, lambda: (never_N, never_N))


def clip(terms: Terms, settings: AlgorithmSettings) -> Objective:
    """Stop the gradient of a token that is pushed further out of the trust region.

    Formula:
        S = min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A);  dual: max(S, dual_clip A) if A < 0

    Kind:
        token

    Use:
        The default. `clip_high` above `clip_low` keeps entropy up; `dual_clip` (3) where large
        ratios with negative advantages occur and no correction truncates them.

    Source:
        Schulman et al. 2017 (PPO), arXiv:1707.06347; separate bounds: Yu et al. 2025 (DAPO),
        arXiv:2503.14476; dual clip: Ye et al. 2020, arXiv:1912.09729.
    """
    return _clip(terms.log_ratios_N, terms.advantages_N, settings)


def gspo(terms: Terms, settings: AlgorithmSettings) -> Objective:
    """Clip whole episodes, by the geometric mean of their tokens' ratios.

    Formula:
        S = min(s A, clamp(s, 1 - clip_low, 1 + clip_high) A),  s = r(1..T)^(1/T)

    Kind:
        sequence

    Use:
        Mixtures of experts and long answers, whose token ratios are noisy; bounds are a thousand
        times tighter than PPO's; aggregation `sequence`.

    Source:
        Zheng et al. 2025, arXiv:2507.18071, sections 4.1 and 4.3 (GSPO-token).
    """
    log_ratios_N = terms.log_ratios_N
    mean_N = terms.segments.mean(log_ratios_N.detach())
    return _clip(mean_N + log_ratios_N - log_ratios_N.detach(), terms.advantages_N, settings)


def gmpo(terms: Terms, settings: AlgorithmSettings) -> Objective:
    """Maximise the geometric mean of token ratios, each clipped where it is pushed outwards.

    Formula:
        S = (product over 1..T of c)^(1/T) A,
        c = min(r, exp(clip_high)) if A > 0, max(r, exp(-clip_low)) if A < 0

    Kind:
        sequence

    Use:
        As GSPO, with a bound on each token, in log space: one outlier does not clip its episode.

    Source:
        Zhao et al. 2025, arXiv:2507.20673, section 3.
    """
    log_ratios_N, advantages_N = terms.log_ratios_N, terms.advantages_N
    low_N = (advantages_N < 0) & (log_ratios_N < -settings.clip_low)
    high_N = (advantages_N > 0) & (log_ratios_N > settings.clip_high)
    clipped_N = torch.where(low_N, -settings.clip_low, log_ratios_N.detach())
    clipped_N = torch.where(high_N, settings.clip_high, clipped_N)
    mean_N = terms.segments.mean(clipped_N)
    moving_N = torch.where(low_N | high_N, 0.0, log_ratios_N - log_ratios_N.detach())
    return Objective((mean_N + moving_N).exp() * advantages_N, lambda: (low_N, high_N))


def cispo(terms: Terms, settings: AlgorithmSettings) -> Objective:
    """Clip the weight of a token instead of its gradient: no token is ever left out.

    Formula:
        S = sg(clamp(r, 1 - clip_low, 1 + clip_high)) A log(pi)

    Kind:
        token

    Use:
        Long reasoning, whose rare turning points PPO's clip would silence. Wide bounds, and none
        below (`clip_low: 1`).

    Source:
        MiniMax 2025 (M1), arXiv:2506.13585, section 3.1.
    """
    ratios_N = terms.log_ratios_N.detach().exp()
    weights_N = ratios_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    values_N = weights_N * terms.advantages_N * _moving(terms.log_ratios_N)
    return Objective(values_N, lambda: (ratios_N < weights_N, ratios_N > weights_N))


def topr(terms: Terms, _settings: AlgorithmSettings) -> Objective:
    """Learn from good episodes as they are; from bad ones only as far as pi would make them.

    Formula:
        S = w A log(pi);  w = 1 if A > 0, sg(min(r(1..T), 1)) if A < 0

    Kind:
        sequence

    Use:
        Far off-policy data with a fixed source of good answers. Drops pi/mu where A > 0, on
        purpose: it fits them, as supervised learning does.

    Source:
        Le Roux et al. 2025, arXiv:2503.14286, section 3, with taper bounds (1, 1) and (0, 1).
    """
    advantages_N = terms.advantages_N
    product_N = terms.segments.sum(terms.log_ratios_N.detach())
    is_bad_N = advantages_N < 0
    weights_N = torch.where(is_bad_N, product_N.clamp(max=0).exp(), 1.0)
    values_N = weights_N * advantages_N * _moving(terms.log_ratios_N)
    return Objective(values_N, lambda: (torch.zeros_like(is_bad_N), is_bad_N & (product_N > 0)))


def m2po(terms: Terms, _settings: AlgorithmSettings) -> Objective:
    """Leave out a step's farthest tokens, until the rest has a small second moment.

    Formula:
        S = r A, 0 where A > 0, log(r) > b or A < 0, log(r) < -b;  b: the largest with
        mean of log(r)^2 <= second_moment over the tokens with A log(r) > 0 that it leaves

    Kind:
        token (bound: all tokens of an optimizer step)

    Use:
        Large lags: a clip at fixed bounds silences the tokens that matter most, this hardly any.
        One forward pass more, for the bound of each optimizer step.

    Source:
        Zheng et al. 2025, arXiv:2510.01161.
    """
    bound = terms.log_ratio_bound
    is_far_N = terms.log_ratios_N.abs() > bound
    return _masked(terms, is_far_N, is_far_N)


def dppo_tv(terms: Terms, settings: AlgorithmSettings) -> Objective:
    """Leave out tokens that are pushed outwards and whose probability has moved too far.

    Formula:
        S = r A, 0 where A > 0, pi - mu > clip_high or A < 0, mu - pi > clip_low

    Kind:
        token

    Use:
        In place of a clip: rare tokens may change their ratio a lot, frequent ones may not.

    Source:
        Qi et al. 2026 (DPPO, binary total variation), arXiv:2602.04879.
    """
    distance_N = (terms.log_pi_N.exp() - terms.log_anchor_N.exp()).abs()
    return _masked(terms, distance_N > settings.clip_low, distance_N > settings.clip_high)


def dppo_kl(terms: Terms, settings: AlgorithmSettings) -> Objective:
    """Leave out tokens that are pushed outwards, by the KL divergence of token against rest.

    Formula:
        S = r A, 0 where A > 0, r > 1, D > clip_high or A < 0, r < 1, D > clip_low;
        D = mu log(mu/pi) + (1 - mu) log((1 - mu) / (1 - pi))

    Kind:
        token

    Use:
        As `dppo_tv`, stricter with tokens that vanish.

    Source:
        Qi et al. 2026 (DPPO, binary KL), arXiv:2602.04879.
    """
    mu_N, pi_N = terms.log_anchor_N.exp(), terms.log_pi_N.exp()
    tiny = torch.finfo(mu_N.dtype).tiny
    rest_N = ((1 - mu_N).clamp(min=tiny) / (1 - pi_N).clamp(min=tiny)).log()
    distance_N = mu_N * (terms.log_anchor_N - terms.log_pi_N) + (1 - mu_N) * rest_N
    return _masked(terms, distance_N > settings.clip_low, distance_N > settings.clip_high)


SURROGATES: dict[str, Surrogate] = {
    "clip": clip,
    "reinforce": reinforce,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "topr": topr,
    "m2po": m2po,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


WITH_RATIO_BOUND = {"m2po"}
"""Those that read `Terms.log_ratio_bound`, which costs a forward pass."""
OF_TOKENS = frozenset({"clip", "reinforce", "cispo", "m2po", "dppo_tv", "dppo_kl"})
"""Those whose value at a token depends on that token alone."""


def _clip(log_ratios_N: Tensor, advantages_N: Tensor, settings: AlgorithmSettings) -> Objective:
    ratios_N = log_ratios_N.exp()
    clipped_N = ratios_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    values_N = torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)
    dual = settings.dual_clip
    if dual is not None:
        floored_N = torch.maximum(values_N, dual * advantages_N)
        values_N = torch.where(advantages_N < 0, floored_N, values_N)

    def outside() -> tuple[Tensor, Tensor]:
        is_bad_N = advantages_N < 0
        high_N = (advantages_N > 0) & (ratios_N > 1 + settings.clip_high)
        if dual is not None:
            high_N = high_N | (is_bad_N & (ratios_N > dual))
        return is_bad_N & (ratios_N < 1 - settings.clip_low), high_N

    return Objective(values_N, outside)


def _masked(terms: Terms, is_far_low_N: Tensor, is_far_high_N: Tensor) -> Objective:
    """Return r A for tokens that are not far out in their advantage's direction, else 0."""
    log_ratios_N, advantages_N = terms.log_ratios_N, terms.advantages_N
    low_N = is_far_low_N & (advantages_N < 0) & (log_ratios_N < 0)
    high_N = is_far_high_N & (advantages_N > 0) & (log_ratios_N > 0)
    # The ratio of a masked token may be infinite: it must not meet the zero.
    ratios_N = torch.where(low_N | high_N, 0.0, log_ratios_N).exp()
    values_N = torch.where(low_N | high_N, 0.0, ratios_N * advantages_N)
    return Objective(values_N, lambda: (low_N, high_N))


def _moving(log_ratios_N: Tensor) -> Tensor:
    """Return 1 with the gradient of log(pi)."""
    return (log_ratios_N - log_ratios_N.detach()).exp()
