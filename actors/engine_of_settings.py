"""The engine of an actor, made from the settings of its run.

The only module that names the classes behind the `Engine` protocol.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from actors.engine.choice import (
    ENGINES,
    engine_device,
    engine_of_this_process,
    episodes_at_a_time,
    import_function,
)
from actors.engine.engine import Engine
from actors.engine.engine_args import check_engine_args
from actors.weights.worker_line import WorkerLine
from configs.settings import Settings

from .capacity import CacheMeter


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """The device of an engine, its seed, and its connections to the actor."""

    model: str
    device: str
    seed: int
    max_model_len: int
    probe_temperature: float
    """Temperature of the log-probs that a probe returns."""
    line: WorkerLine | None
    """Line to the first worker of an engine in processes of its own."""
    meter: CacheMeter | None
    """Records the state of the KV cache; None = the state is not needed."""


def line_to_worker(settings: Settings) -> WorkerLine | None:
    """Listen for the first worker of an actor's engine; None where that is the actor's process.

    Raises:
        SettingsError: The engine cannot run on this machine.
    """
    return None if runs_in_process(settings) else WorkerLine()


def runs_in_process(settings: Settings) -> bool:
    """Return whether an actor's engine runs in the actor's own process; raises as above."""
    actors = settings.actors
    if not ENGINES[engine_of_this_process(settings).engine].has_processes:
        return True
    if actors.in_process is not None:
        return actors.in_process
    return engine_device() == "cpu" and actors.tensor_parallel_size == 1


def make_engine(
    settings: Settings,
    line: WorkerLine | None = None,
    meter: CacheMeter | None = None,
    *,
    teacher: str | None = None,
) -> tuple[Engine, str]:
    """Return the engine of an actor, not started, and the device it runs on.

    The device is the CPU where `run.deterministic` is set. The engine's seed is drawn at random.

    Args:
        settings: Settings of the run.
        line: Line to the first worker of an engine in processes of its own.
        meter: Records the state of the KV cache; None = the state is not needed.
        teacher: Model that only scores: its probes are as long as episodes, at the temperature of
            the run. None = the model of the run.

    Raises:
        SettingsError: The engine cannot run on this machine, or actors.engine_args are wrong.
    """
    run = settings.run
    longest = settings.actors.max_model_len or run.max_prompt_tokens + run.max_completion_tokens
    place = EnginePlacement(
        model=run.model_path if teacher is None else teacher,
        device="cpu" if run.deterministic else engine_device(),
        seed=secrets.randbits(31),  # with equal seeds actors would sample equal texts of a prompt
        max_model_len=longest if teacher is None else longest + 1,  # vLLM makes a token of each
        probe_temperature=1.0 if teacher is None else run.temperature,
        line=line,
        meter=meter,
    )
    make: Callable[[Settings, EnginePlacement], Engine]
    make = import_function(ENGINES[engine_of_this_process(settings).engine].make)
    return make(settings, place), place.device


def make_torch_engine(settings: Settings, place: EnginePlacement) -> Engine:
    """Return the small engine in torch."""
    from actors.engine.torch_engine import TorchOptions, torch_engine  # noqa: PLC0415 - torch

    run, actors = settings.run, settings.actors
    options = TorchOptions(
        model=place.model,
        max_model_len=place.max_model_len,
        dtype=run.dtype,
        head_dtype=run.head_dtype,
        max_concurrent=episodes_at_a_time(settings, on_gpu=place.device == "cuda"),
        threads=actors.threads,
        device=place.device,
        seed=place.seed,
        recompute_kv=actors.kv_on_swap == "recompute",
        deterministic=run.deterministic,
        probe_temperature=place.probe_temperature,
    )
    return torch_engine(options)


def make_vllm_engine(settings: Settings, place: EnginePlacement) -> Engine:
    """Return vLLM as an engine.

    Raises:
        SettingsError: vLLM cannot start on this machine, or `actors.engine_args` are refused.
    """
    from actors.engine.vllm_engine import vllm_engine  # noqa: PLC0415 - vLLM
    from actors.engine.vllm_options import VllmOptions  # noqa: PLC0415 - vLLM

    run, actors = settings.run, settings.actors
    check_engine_args(actors.engine_args)
    options = VllmOptions(
        model=place.model,
        max_model_len=place.max_model_len,
        dtype=run.dtype,
        head_dtype=run.head_dtype,
        max_concurrent=episodes_at_a_time(settings, on_gpu=place.device == "cuda"),
        in_process=runs_in_process(settings),
        line=place.line.path if place.line is not None else "",
        threads=actors.threads,
        kv_cache_gib=actors.kv_cache_gib,
        recompute_kv=actors.kv_on_swap == "recompute",
        gpu_memory_utilization=actors.gpu_memory_utilization,
        tensor_parallel_size=actors.tensor_parallel_size,
        seed=place.seed,
        engine_args=actors.engine_args,
        probe_temperature=place.probe_temperature,
    )
    return vllm_engine(options, meter=place.meter)
