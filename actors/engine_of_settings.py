"""The engine of an actor, made from the settings of its run.

The only module that names the classes behind the `Engine` protocol.
"""

from __future__ import annotations

import secrets

from actors.engine.choice import engine_of_this_process
from actors.engine.engine import Engine
from actors.engine.engine_args import check_engine_args
from actors.membership.worker_line import WorkerLine
from configs.settings import Settings

from .capacity import CacheMeter


def line_to_worker(settings: Settings) -> WorkerLine | None:
    """Listen for the first worker of an actor's engine; None where that is the actor's process."""
    return None if runs_in_process(settings) else WorkerLine()


def runs_in_process(settings: Settings) -> bool:
    """Return whether an actor's engine runs in the actor's own process."""
    from actors.engine.device import engine_device  # noqa: PLC0415 - torch

    actors = settings.actors
    if engine_of_this_process(settings).engine == "torch":
        return True
    if actors.in_process is not None:
        return actors.in_process
    return engine_device() == "cpu" and actors.tensor_parallel_size == 1


def make_engine(
    settings: Settings, line: WorkerLine | None = None, meter: CacheMeter | None = None
) -> tuple[Engine, str]:
    """Return the engine of an actor, not started, and the device it runs on.

    Args:
        settings: Of the run.
        line: To the first worker of an engine in processes of its own.
        meter: Of its KV cache; None = nobody looks at it.
    """
    from actors.engine.device import engine_device  # noqa: PLC0415 - torch

    run, actors = settings.run, settings.actors
    device = "cpu" if run.deterministic else engine_device()
    seed = secrets.randbits(31)  # with one seed two actors would sample the same of one prompt
    max_model_len = actors.max_model_len or run.max_prompt_tokens + run.max_completion_tokens
    if engine_of_this_process(settings).engine == "torch":
        from actors.engine.torch_engine import TorchOptions, torch_engine  # noqa: PLC0415 - torch

        options = TorchOptions(
            model=run.model_path,
            max_model_len=max_model_len,
            dtype=run.dtype,
            head_dtype=run.head_dtype,
            max_concurrent=actors.slots,
            threads=actors.threads,
            device=device,
            seed=seed,
            recompute_kv=actors.kv_on_swap == "recompute",
            deterministic=run.deterministic,
        )
        return torch_engine(options), device
    from actors.engine.vllm_engine import vllm_engine  # noqa: PLC0415 - vLLM
    from actors.engine.vllm_options import VllmOptions  # noqa: PLC0415 - vLLM

    check_engine_args(actors.engine_args)
    vllm_options = VllmOptions(
        model=run.model_path,
        max_model_len=max_model_len,
        dtype=run.dtype,
        head_dtype=run.head_dtype,
        max_concurrent=actors.slots,
        in_process=runs_in_process(settings),
        line=line.path if line is not None else "",
        threads=actors.threads,
        kv_cache_gib=actors.kv_cache_gib,
        recompute_kv=actors.kv_on_swap == "recompute",
        gpu_memory_utilization=actors.gpu_memory_utilization,
        tensor_parallel_size=actors.tensor_parallel_size,
        seed=seed,
        engine_args=actors.engine_args,
    )
    return vllm_engine(vllm_options, meter=meter), device
