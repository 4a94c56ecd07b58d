r"""The policy-gradient loss: correction x surrogate x aggregation, each chosen by name.

With rho = pi/mu for each token, A its advantage and sg = stop-gradient:

    u(rho)  = correction: the importance ratio that the surrogate sees; du = u * dlog(pi)
    S(u, A) = surrogate: what is maximised for one token
    w       = aggregation: what one token weighs, known before the forward pass
    loss    = - sum_n w_n * (S(u_n, A_n) + entropy_bonus * H_n)

A batch is trained by one optimizer step, so the policy at the start of the step *is* pi, and mu is
the only other policy there is: the trust region of `clip` is measured from mu. Hence pi/mu enters
every loss exactly once, through u; no choice of names can drop it or apply it twice:

    none x clip       PPO, DAPO about mu: min(rho A, clamp(rho, 1 - low, 1 + high) A)
    none x reinforce  plain importance sampling: rho A
    tis  x clip       the same with rho truncated at rho_bar, which bounds the one case that PPO
                      leaves open, A < 0 and a large rho (the default)
    tis  x reinforce  truncated importance sampling: gradient min(rho, rho_bar) A dlog(pi)

At pi = mu all four have the on-policy gradient A dlog(pi). Weights w divide by counts over the
whole batch, all ranks and microbatches: however a batch is cut, the gradient is the same.

Adding one = a function here and a line in its table.

Shapes: N scored tokens, flat. E episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.settings import AlgorithmSettings

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Counts:
    """What a whole batch holds, over all ranks."""

    tokens: int
    """Tokens with loss mask 1."""
    episodes: int
    """Episodes with at least one such token."""
    max_completion_tokens: int
    """`run.max_completion_tokens`: the constant that Dr.GRPO divides by."""


Correction = Callable[[Tensor, AlgorithmSettings], Tensor]
Surrogate = Callable[[Tensor, Tensor, AlgorithmSettings], Tensor]
Aggregation = Callable[[Int64, Counts], Float32]


def importance_ratio(log_rhos_N: Tensor, _settings: AlgorithmSettings) -> Tensor:
    """Use pi/mu as it is."""
    return log_rhos_N.exp()


def truncated_ratio(log_rhos_N: Tensor, settings: AlgorithmSettings) -> Tensor:
    """Truncate pi/mu at `rho_bar`; a truncated token still has a gradient, of weight `rho_bar`.

    Source:
        Espeholt et al. 2018, arXiv:1802.01561, section 4.1; Ionides 2008.
    """
    truncated_N = log_rhos_N.detach().exp().clamp(max=settings.rho_bar)
    # A factor of value 1 whose gradient is dlog(pi): u = min(rho, rho_bar) and du = u dlog(pi).
    return truncated_N * (log_rhos_N - log_rhos_N.detach()).exp()


def clip(ratios_N: Tensor, advantages_N: Tensor, settings: AlgorithmSettings) -> Tensor:
    """Stop the gradient of a token that has left the trust region in its advantage's direction.

    Source:
        Schulman et al. 2017, arXiv:1707.06347; separate bounds: Yu et al. 2025 (DAPO),
        arXiv:2503.14476.
    """
    clipped_N = ratios_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)


def reinforce(ratios_N: Tensor, advantages_N: Tensor, _settings: AlgorithmSettings) -> Tensor:
    """Weigh the policy gradient with the ratio, without a trust region."""
    return ratios_N * advantages_N


def token(lengths_E: Int64, counts: Counts) -> Float32:
    """Average over all tokens of the batch: long episodes weigh more."""
    return np.full(len(lengths_E), 1 / max(1, counts.tokens), dtype=np.float32)


def sequence(lengths_E: Int64, counts: Counts) -> Float32:
    """Average over the tokens of each episode, then over episodes: episodes weigh alike."""
    return (1 / (np.maximum(1, lengths_E) * max(1, counts.episodes))).astype(np.float32)


def dr_grpo(lengths_E: Int64, counts: Counts) -> Float32:
    """Divide by a constant length: a token weighs the same in every episode of every batch.

    Source:
        Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    return np.full(
        len(lengths_E),
        1 / (counts.max_completion_tokens * max(1, counts.episodes)),
        dtype=np.float32,
    )


CORRECTIONS: Mapping[str, Correction] = {"none": importance_ratio, "tis": truncated_ratio}
SURROGATES: Mapping[str, Surrogate] = {"clip": clip, "reinforce": reinforce}
AGGREGATIONS: Mapping[str, Aggregation] = {
    "token": token,
    "sequence": sequence,
    "dr_grpo": dr_grpo,
}


def policy_loss(
    log_rhos_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    entropies_N: Tensor,
    settings: AlgorithmSettings,
) -> Tensor:
    """Compute this microbatch's share of the loss of the batch.

    Args:
        log_rhos_N: log(pi/mu), nats, with gradient through log pi. Shape [N].
        advantages_N: Shape [N].
        weights_N: What each token weighs (aggregation). Shape [N].
        entropies_N: Entropy of pi at each token, nats. Shape [N].
        settings: Names and bounds.

    Returns:
        A scalar; the shares of all microbatches and ranks add up to the loss of the batch.
    """
    assert log_rhos_N.shape == advantages_N.shape == weights_N.shape == entropies_N.shape
    ratios_N = CORRECTIONS[settings.correction](log_rhos_N, settings)
    objective_N = SURROGATES[settings.surrogate](ratios_N, advantages_N, settings)
    if settings.entropy_bonus > 0:
        objective_N = objective_N + settings.entropy_bonus * entropies_N
    return -(weights_N * objective_N).sum()
