"""Use of a card's arithmetic by training: MFU.

    MFU = floating-point operations that the model needs / (seconds x ranks x peak of a card)

Needed are a forward and a backward pass over the tokens that were run, as `sequence_cost.py` counts
them: nothing that activation checkpointing computes again, and none of the passes without a
gradient. The seconds are those of forward, backward, clip and optimizer, all waits within included.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

PEAK_TFLOPS = {
    "NVIDIA A10": 125.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.4,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.05,
}
"""Name that the driver gives a card -> 10^12 operations a second in bfloat16, dense, as NVIDIA's
data sheets state them (half of a figure "with sparsity")."""
TRAINING = ("forward", "backward", "clip", "optimizer")
"""The phases of optimizer steps."""
PER_MULTIPLY_ADD = 6.0
"""Operations of a forward and a backward pass: two for the one, four for the other."""


def stated_peak(device: torch.device, dtype: str) -> float | None:
    """Return a card's peak, 10^12 operations a second; None where none is stated for it."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    return PEAK_TFLOPS.get(torch.cuda.get_device_name(device))


def utilization(
    multiply_adds: float, seconds: Mapping[str, float], *, ranks: int, peak_tflops: float | None
) -> float | None:
    """Compute the MFU of a batch; None without a peak.

    Args:
        multiply_adds: Of one forward pass over all that all ranks trained, each epoch counted.
        seconds: By phase.
        ranks: Cards.
        peak_tflops: Of a card.
    """
    spent_s = sum(seconds[name] for name in TRAINING)
    if peak_tflops is None or not spent_s:
        return None
    return PER_MULTIPLY_ADD * multiply_adds / (spent_s * ranks * peak_tflops * 1e12)
