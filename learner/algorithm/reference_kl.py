r"""The KL penalty that keeps pi near a frozen reference policy.

    delta = log pi - log ref for each sampled token,  u = min(pi/mu, rho_bar)

    k1 = delta,  k2 = delta^2 / 2,  k3 = exp(-delta) - 1 + delta   estimates of KL(pi || ref)

Tokens come from mu, not from pi, so each weighs u: E_mu[(pi/mu) k] is E_pi[k]. `kl_in: loss` adds
coefficient * u * k to the loss. Its gradient, u differentiated with it, is that of KL(pi || ref)
itself (but for tokens that rho_bar truncates):

    k1   u (delta + 1) dlog(pi)   the 1 vanishes in expectation and adds variance
    k2   u  delta      dlog(pi)   with u held constant
    k3   u  delta      dlog(pi)   the value is unbiased too, and never negative

Without u, or with u held constant, the gradient of k3 is that of the reversed KL and that of k1
zero in expectation. `kl_in: reward` takes coefficient * k1 from each token's reward instead; the
policy gradient of k1 is that of KL(pi || ref), that of k2 and k3 is not, so they are refused.

Shapes: N scored tokens, flat; B episodes.

Source:
    Schulman 2020, "Approximating KL divergence" (k1, k2, k3); Tang and Munos 2025,
    arXiv:2506.09477 (which gradient each has); DeepSeek-AI 2025 (DeepSeek-V3.2),
    arXiv:2512.02556, section 3.1 (k3 weighed with the ratio).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings

from .microbatch import Microbatch, TrajectoryOrder
from .vtrace import discounted_sums

ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda deltas_N: deltas_N,
    "k2": lambda deltas_N: deltas_N.square() / 2,
    "k3": lambda deltas_N: torch.expm1(-deltas_N) + deltas_N,
}


def kl_penalty(
    log_pi_N: Tensor, log_ref_N: Tensor, log_rhos_N: Tensor, settings: AlgorithmSettings
) -> Tensor:
    """Estimate KL(pi || ref) at each token, with the gradient of the KL.

    Args:
        log_pi_N: log pi of the sampled tokens, nats, with gradient. Shape [N].
        log_ref_N: Their log-probs under the reference, nats. Shape [N].
        log_rhos_N: log(pi/mu), nats. Shape [N].
        settings: The estimator and `rho_bar`.

    Returns:
        u k at each token, nats. Shape [N].
    """
    assert log_pi_N.shape == log_ref_N.shape == log_rhos_N.shape
    deltas_N = log_pi_N.detach() - log_ref_N
    ratios_N = log_rhos_N.detach().exp().clamp(max=settings.rho_bar)
    values_N = ratios_N * ESTIMATORS[settings.kl_estimator](deltas_N)
    # Written out, because the terms of k3's gradient cancel badly in float32 at large -delta.
    slopes_N = ratios_N * (deltas_N + 1 if settings.kl_estimator == "k1" else deltas_N)
    return values_N + slopes_N * (log_pi_N - log_pi_N.detach())


def kl_rewards(log_pi_N: Tensor, log_ref_N: Tensor, settings: AlgorithmSettings) -> Tensor:
    """Penalise each token's distance to the reference, as a reward.

    Args:
        log_pi_N: Under the policy at the beginning of the batch, nats. Shape [N].
        log_ref_N: Under the reference. Shape [N].
        settings: The coefficient.

    Returns:
        -coefficient (log pi - log ref), nats. Shape [N].

    Source:
        Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, equation 2.
    """
    return -settings.kl_coefficient * (log_pi_N - log_ref_N)


def rewards_to_go(microbatch: Microbatch, rewards_N: Tensor) -> Tensor:
    """Add to each episode's reward the rewards of its tokens from each one on, on its trajectory.

    Args:
        microbatch: Microbatch with each token's episode, and each episode's reward.
        rewards_N: Rewards of single tokens. Shape [N].

    Returns:
        r + sum over t' >= t of rewards_t', for each token t. Shape [N], float32.

    Source:
        Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, token-level KL penalty in the reward.
    """
    order = TrajectoryOrder.from_microbatch(microbatch)
    goes_on_N = (~order.is_last_N).double()
    sums_N1 = discounted_sums(rewards_N.double()[order.order_N, None], goes_on_N[:, None])
    to_go_N = microbatch.rewards_B[microbatch.episodes_N] + order.restore(sums_N1.squeeze(1))
    return to_go_N.float()
