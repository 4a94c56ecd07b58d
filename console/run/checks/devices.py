"""Check that the learner gets the GPUs that it is given, before it starts."""

from __future__ import annotations

import subprocess
import sys

from configs.errors import SettingsError
from configs.machine.gpus import gpu_left_out, query_gpus, visible_gpus
from configs.settings import LearnerSettings

TORCH_S = 120.0
"""Torch is imported, and the driver may have to be woken."""
# In a process of its own: to ask for CUDA forbids every later fork to use it.
ASK_TORCH = "import torch; print(int(torch.cuda.is_available()), torch.version.cuda or '')"


def check_devices(learner: LearnerSettings) -> str:
    """There are as many GPUs as the settings require, and torch sees those that there are.

    Raises:
        SettingsError: It is not so.
    """
    if learner.device == "cpu":
        return "cpu"
    count = len(visible_gpus())
    if count and query_gpus("index"):
        _check_torch(learner)
    if learner.device == "cuda" and count < (learner.min_ranks or learner.ranks):
        raise SettingsError(
            f"learner.ranks must be <= the GPUs of this machine = {count}, "
            f"got {learner.ranks}; use fewer ranks, or learner.device=cpu"
        )
    return f"{learner.device}, {count} GPU(s)"


def _check_torch(learner: LearnerSettings) -> None:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_S,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return  # each role says what is wrong with torch when it starts
    is_available, _, cuda = asked.stdout.strip().partition(" ")
    error = gpu_left_out(learner.device, cuda or None) if is_available == "0" else None
    if error is not None:
        raise SettingsError(error)
