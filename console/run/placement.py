"""Placement of processes on this machine: GPUs, threads, environment variables.

Pure. The learner's ranks come first, then the actors; when
there are fewer GPUs than wanted, actors share, beginning again with the last ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from actors.engine.choice import choose_engine
from configs.own_code import ROOT
from configs.secrets import FILE_VARIABLE, VARIABLE
from configs.settings import Settings

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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


def shared_card_warning(settings: Settings, gpus: Sequence[str]) -> str | None:
    """Name the card on which an actor would measure free memory while the learner takes some."""
    actors = settings.actors
    engine = choose_engine(settings, on_gpu=bool(gpus)).engine
    if engine != "vllm" or actors.kv_cache_gib is not None:
        return None
    taken = {gpu for number in range(actors.count) for gpu in actor_gpus(settings, gpus, number)}
    shared = taken.intersection(learner_gpus(settings, gpus))
    if not shared:
        return None
    return (
        f"learner and actor share GPU {', '.join(sorted(shared))}, and the actor counts what the "
        f"learner takes meanwhile as its own: set actors.kv_cache_gib, and "
        f"actors.gpu_memory_utilization to what is free when it starts"
    )
