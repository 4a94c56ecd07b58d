"""Placement of processes on this machine: GPUs, threads, environment variables.

Pure but for `visible_gpus` and `query_gpus`. The learner's ranks come first, then the actors; when
there are fewer GPUs than wanted, actors share, beginning again with the last ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from configs.own_code import ROOT
from configs.secrets import FILE_VARIABLE, VARIABLE
from configs.settings import Settings

QUERY_TIMEOUT_S = 20.0  # nvidia-smi takes seconds where the driver must be woken first
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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
    listed = subprocess.run(
        ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=QUERY_TIMEOUT_S,
        check=False,
    )
    return listed.stdout.split() if listed.returncode == 0 else []


def learner_gpus(settings: Settings, gpus: Sequence[str]) -> list[str]:
    """Choose the GPUs of the learner's ranks; none on a CPU."""
    return [] if settings.learner.device == "cpu" else list(gpus[: settings.learner.ranks])


def actor_gpus(settings: Settings, gpus: Sequence[str], number: int) -> list[str]:
    """Choose the GPUs of one actor, counted from 0."""
    rest = list(gpus[len(learner_gpus(settings, gpus)) :]) or list(gpus)
    size = settings.actors.tensor_parallel_size
    if len(rest) < size:
        rest = list(gpus)
    first = (number * size) % max(1, len(rest) - len(rest) % size or len(rest))
    return rest[first : first + size]


def environment_of(
    role: str,
    settings: Settings,
    *,
    gpus: Sequence[str] = (),
    inherited: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the environment variables of a process."""
    environment = dict(inherited)
    threads = {"actor": settings.actors.threads, "learner": settings.learner.threads}.get(role, 1)
    for name in THREAD_VARIABLES:
        environment[name] = str(threads)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"  # its threads would fight for the same cores
    if environment.get("PYTHONPATH"):  # ours first: its folders may have packages of our names
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    if role == "actor":
        for name in (VARIABLE, FILE_VARIABLE):
            environment.pop(name, None)  # an actor has no business with Redis
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment
