"""The policy-gradient loss: advantage x correction x surrogate x aggregation, each chosen by name.

The names are in `advantages.py`, `corrections.py`, `surrogates.py` and `aggregations.py`, each a
function and a line of its module's table, and the anchors below. `nyala losses` shows
the sections `Formula:`, `Kind:`, `Use:` and `Source:` of their docstrings; default bounds are those
of `configs/tables/algorithm.py`. With w the aggregation's weight of a token:

    proximal: behaviour     loss = - sum_n w keep(pi/mu) S(u(pi/mu), A)
    proximal: otherwise     loss = - sum_n w keep(prox/mu) u(prox/mu) S(pi/prox, A)

To the term of each token, masked ones included, `entropy_bonus` adds its multiple of the entropy,
and `kl_in: loss` the KL penalty (`reference_kl.py`), which is subtracted.

Either way pi/mu enters once: as the surrogate's ratio, or as prox/mu times pi/prox. Choices that
would drop it, or measure from the wrong policy, are refused by `configs/validation/algorithm.py`.
V-trace has prox/mu in its advantages, so no correction weighs it again. At pi = prox = mu all have
the on-policy gradient A dlog(pi).

Published methods (advantages as in their papers):

    method                 correction     surrogate          proximal       aggregation
    PPO                    none           clip               behaviour      token
    DAPO                   none           clip, high > low   behaviour      token
    GSPO                   none           gspo               behaviour      sequence
    GMPO                   none           gmpo               behaviour      sequence
    CISPO                  none           cispo              behaviour      token
    M2PO                   none           m2po               behaviour      token
    DPPO                   none           dppo_tv, dppo_kl   behaviour      token
    TOPR                   none           topr               behaviour      sequence_sum
    IMPALA (vtrace)        none           reinforce          recomputed     token
    decoupled PPO, AReaL   tis            clip               recomputed     token
    A-3PO                  tis            clip               interpolated   token
    TIS                    tis, seq_tis   clip               recomputed     token
    IcePop, MIS            mis, seq_mis   clip               recomputed     token
    verl's rejection       geo_mask, ...  clip               recomputed     token
    ours, by default       tis            clip, high > low   behaviour      token

Shapes: N scored tokens, flat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings

from . import corrections, surrogates
from .corrections import CORRECTIONS
from .microbatch import PreparedMicrobatch, Segments
from .reference_kl import kl_penalty
from .surrogates import SURROGATES, Objective, Terms

# --------------------------------------------------------------------------------------------------
# The proximal policy: the anchor that the surrogate's ratio is measured from.
#
#     behaviour      mu; the correction acts on the surrogate's own ratio pi/mu
#     recomputed     prox, pi at the beginning of the batch, from a pass over it; the correction
#                    weighs prox/mu, the surrogate's ratio is pi/prox
#     interpolated   the same without that pass: prox estimated from mu and pi
#
# The anchor stays the same through all optimizer steps of a batch.
#
# Shapes: N scored tokens (flat).

Anchor = Callable[[Tensor, PreparedMicrobatch], Tensor]


def behaviour(_log_pi_N: Tensor, prepared: PreparedMicrobatch) -> Tensor:
    """Measure from the policy that sampled the tokens.

    Formula:
        r = pi/mu

    Use:
        The default; one pass fewer. The trust region of a stale token is spent by its staleness.

    Source:
        Schulman et al. 2017 (PPO), arXiv:1707.06347.
    """
    return prepared.microbatch.behaviour_logprobs_N


def recomputed(_log_pi_N: Tensor, prepared: PreparedMicrobatch) -> Tensor:
    """Measure from the policy at the beginning of the batch, and weigh with prox/mu.

    Formula:
        r = pi/prox, objective = u(prox/mu) S(r, A)

    Use:
        Large lags with several optimizer steps per batch. With one step r = 1, so no trust region
        ever acts and the correction is all there is (TIS, IcePop, MIS as published).

    Source:
        Hilton et al. 2021, arXiv:2110.00641; Fu et al. 2025 (AReaL), arXiv:2505.24298, section 5.2.
    """
    assert prepared.log_prox_N is not None
    return prepared.log_prox_N


def interpolated(log_pi_N: Tensor, prepared: PreparedMicrobatch) -> Tensor:
    """Estimate the policy at the beginning of the batch from mu, pi and the token's policy lag.

    Formula:
        log(prox) = a log(mu) + (1 - a) log(sg(pi)),  a = 1 / (lag + 1)

    Use:
        As `recomputed` where the extra pass is too expensive; one optimizer step per batch, as prox
        would move with pi from step to step, and to fix it takes the pass that it saves.

    Source:
        A-3PO 2025, arXiv:2512.06547; its staleness counts to the version being made: lag + 1.
    """
    microbatch = prepared.microbatch
    share_N = 1 / (microbatch.lags_N + 1).to(log_pi_N.dtype)
    return share_N * microbatch.behaviour_logprobs_N + (1 - share_N) * log_pi_N.detach()


PROXIMALS: Mapping[str, Anchor] = {
    "behaviour": behaviour,
    "recomputed": recomputed,
    "interpolated": interpolated,
}


# --------------------------------------------------------------------------------------------------
# The policy-gradient loss: advantage x correction x surrogate x aggregation, each chosen by name.


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The loss of a microbatch, and the tokens that were masked or clipped."""

    loss: Tensor
    """This microbatch's share, with gradient; those of all microbatches and ranks add up to the
    loss of an optimizer step. With the entropy bonus, and the KL penalty under `kl_in: loss`."""
    kept_N: Tensor
    """Tokens that the correction did not mask. Shape [N], bool."""
    low_N: Tensor
    """Kept tokens that the surrogate's lower bound acts on. Shape [N], bool."""
    high_N: Tensor
    """Kept tokens that the surrogate's upper bound acts on. Shape [N], bool."""


def policy_loss(
    log_pi_N: Tensor, entropies_N: Tensor, prepared: PreparedMicrobatch, settings: AlgorithmSettings
) -> PolicyLoss:
    """Compute the loss of one microbatch.

    Args:
        log_pi_N: Log-probs under the target policy, nats, with gradient. Shape [N].
        entropies_N: Entropy of pi at each token, nats. Shape [N].
        prepared: The microbatch, with the constants of the batch's optimizer steps.
        settings: Names and bounds.
    """
    loss, keep_N, objective = _loss_of(log_pi_N, entropies_N, prepared, settings)
    low_N, high_N = objective.outside()
    return PolicyLoss(loss, kept_N=keep_N, low_N=low_N & keep_N, high_N=high_N & keep_N)


def loss_alone(
    log_pi_N: Tensor, entropies_N: Tensor, prepared: PreparedMicrobatch, settings: AlgorithmSettings
) -> Tensor:
    """Compute the loss that `policy_loss` computes, without its masks of tokens."""
    return _loss_of(log_pi_N, entropies_N, prepared, settings)[0]


def _loss_of(
    log_pi_N: Tensor, entropies_N: Tensor, prepared: PreparedMicrobatch, settings: AlgorithmSettings
) -> tuple[Tensor, Tensor, Objective]:
    """Return the tokens that the correction keeps, and the objective, too."""
    microbatch = prepared.microbatch
    assert log_pi_N.shape == entropies_N.shape == microbatch.advantages_N.shape
    segments = Segments(microbatch.episodes_N, len(microbatch.rewards_B))
    is_about_mu = settings.proximal == "behaviour"
    log_anchor_N = PROXIMALS[settings.proximal](log_pi_N, prepared)
    gap_N = (log_pi_N if is_about_mu else log_anchor_N) - microbatch.behaviour_logprobs_N
    corrected = CORRECTIONS[settings.correction](gap_N, segments, settings)
    # The ratio of a masked token may be infinite: it must not meet the zero.
    log_u_N = torch.where(corrected.keep_N, corrected.log_ratios_N, 0.0)

    terms = Terms(
        log_ratios_N=log_u_N if is_about_mu else log_pi_N - log_anchor_N,
        advantages_N=microbatch.advantages_N,
        log_pi_N=log_pi_N.detach(),
        log_anchor_N=log_anchor_N,
        segments=segments,
        log_ratio_bound=prepared.log_ratio_bound,
    )
    objective = SURROGATES[settings.surrogate](terms, settings)
    values_N = objective.values_N
    if not is_about_mu and settings.correction != "none":
        values_N = log_u_N.exp() * values_N
    values_N = torch.where(corrected.keep_N, values_N, 0.0)
    if settings.entropy_bonus > 0:
        values_N = values_N + settings.entropy_bonus * entropies_N
    if prepared.log_ref_N is not None and settings.kl_in == "loss":
        log_rhos_N = log_pi_N - microbatch.behaviour_logprobs_N
        kl_N = kl_penalty(log_pi_N, prepared.log_ref_N, log_rhos_N, settings)
        values_N = values_N - settings.kl_coefficient * kl_N
    return -(microbatch.weights_N * values_N).sum(), corrected.keep_N, objective


def is_sum_over_tokens(settings: AlgorithmSettings) -> bool:
    """Whether each token's part of the loss depends on that token's log-prob and entropy alone."""
    return (
        settings.surrogate in surrogates.OF_TOKENS and settings.correction in corrections.OF_TOKENS
    )
