"""GPUs of this machine, as NVIDIA's driver lists them; and why torch sees none of them.

Asks `nvidia-smi`, which needs no CUDA and leaves a process free to fork.
"""

from __future__ import annotations

import os
import shutil
import subprocess

QUERY_TIMEOUT_S = 20.0  # nvidia-smi takes seconds where the driver must be woken first
LEAST_DRIVERS = {12: 525, 13: 580}
"""Oldest driver of each CUDA of torch (docs.nvidia.com, "CUDA Compatibility")."""


def visible_gpus() -> list[str]:
    """List the GPUs that we may use, as CUDA_VISIBLE_DEVICES names them."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return [gpu.strip() for gpu in limited.split(",") if gpu.strip() not in {"", "-1"}]
    return query_gpus("index")


def query_gpus(field: str) -> list[str]:
    """Ask the driver for one field of every GPU; nothing where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:  # a driver that hangs has no GPU for us
        return []
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]


def gpu_left_out(device: str, cuda: str | None) -> str | None:
    """Write the error of a learner whose torch sees no GPU beside GPUs that the driver lists.

    Args:
        device: `learner.device`.
        cuda: Version that torch is built for; None = it is a build for CPUs.

    Returns:
        The error; None where there is none: the driver lists no GPU, or we may use none.
    """
    names = query_gpus("name")
    if not names or not visible_gpus():
        return None
    return (
        f"learner.device must be cpu to train without this machine's {len(names)} GPU(s), got "
        f"{device}: nvidia-smi lists {names[0]}, and {_reason(cuda)}, or set learner.device: cpu"
    )


def _reason(cuda: str | None) -> str:
    """Say why torch sees no GPU, and what to do."""
    if cuda is None:
        return "torch is a build for CPUs; set up with PROFILE=cuda ./run setup"
    versions = query_gpus("driver_version")
    major = versions[0].partition(".")[0] if versions else ""
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if major.isdigit() and int(major) < least:
        return f"CUDA {cuda} needs driver {least} or newer, got {versions[0]}; update the driver"
    return (
        f"torch, built for CUDA {cuda}, sees none; find out why with `python -m "
        f"torch.utils.collect_env`"
    )
