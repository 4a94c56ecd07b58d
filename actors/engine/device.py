"""The device of the engines, found without the CUDA driver."""

from __future__ import annotations

import torch


def engine_device() -> str:
    """Return `cuda` where torch is built for it and a GPU is visible to this process, else `cpu`.

    `torch.cuda.is_available` would start the driver, and no later fork of this process could use
    CUDA. The count of devices comes from NVML (docs.pytorch.org, "Poison fork in multiprocessing").
    """
    return "cuda" if torch.cuda.device_count() > 0 else "cpu"
