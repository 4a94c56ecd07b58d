"""The proximal policy: the anchor that the surrogate's ratio is measured from.

    behaviour      mu; the correction acts on the surrogate's own ratio pi/mu
    recomputed     prox, pi at the beginning of the batch, from a pass over it; the correction
                   weighs prox/mu, the surrogate's ratio is pi/prox
    interpolated   the same without that pass: prox estimated from mu and pi

The anchor stays the same through all optimizer steps of a batch.

Shapes: N scored tokens (flat).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from .microbatch import Prepared

Anchor = Callable[[Tensor, Prepared], Tensor]


def behaviour(_log_pi_N: Tensor, prepared: Prepared) -> Tensor:
    """Measure from the policy that sampled the tokens.

    Formula:
        r = pi/mu

    Use:
        The default; one pass fewer. The trust region of a stale token is spent by its staleness.

    Source:
        Schulman et al. 2017 (PPO), arXiv:1707.06347.
    """
    return prepared.microbatch.behaviour_logprobs_N


def recomputed(_log_pi_N: Tensor, prepared: Prepared) -> Tensor:
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


def interpolated(log_pi_N: Tensor, prepared: Prepared) -> Tensor:
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
