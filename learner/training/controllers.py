"""Coefficients that follow a target: the weight of the KL penalty, and that of the entropy.

Pure functions of one batch's figure; the coefficients themselves are part of a checkpoint.
"""

from __future__ import annotations

MOST_KL_ERROR = 0.2  # Ziegler et al. 2019: one odd batch must not throw the coefficient
KL_GAIN = 0.1  # the same source


def adapt_kl_coefficient(coefficient: float, kl: float, *, target: float) -> float:
    """Raise the weight of the KL penalty where the KL is above its target, lower it below.

        e = clamp((kl - target) / target, -0.2, 0.2)
        coefficient <- coefficient (1 + 0.1 e)

    Args:
        coefficient: Weight in this batch.
        kl: KL(pi || ref) of this batch, nats per token.
        target: What it should be, nats per token.

    Returns:
        The weight in the next batch.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """
    error = min(MOST_KL_ERROR, max(-MOST_KL_ERROR, (kl - target) / target))
    return coefficient * (1 + KL_GAIN * error)


def adapt_entropy_bonus(bonus: float, entropy: float, *, target: float, step: float) -> float:
    """Raise the weight of the entropy by a fixed step below its target, lower it above, to 0.

    Args:
        bonus: Weight in this batch.
        entropy: Mean entropy of pi in this batch, nats per token.
        target: What it should be at least, nats per token.
        step: How much the weight changes with a batch.

    Returns:
        The weight in the next batch.

    Source:
        He et al. 2025 (Skywork-OR1), arXiv:2505.22312, section on adaptive entropy control.
    """
    return max(0.0, bonus + (step if entropy < target else -step))
