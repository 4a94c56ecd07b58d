"""Options of vLLM: from settings to its environment variables and the arguments of its engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from configs.forks import has_met_cuda
from configs.machine import compiled_folders, folder_of_sockets

from .choice import engine_device
from .engine_args import CPU_KV_CACHE_GIB

NCCL_FORMS_S = 30
"""Longest wait for a communicator to form; the publisher gives it up earlier."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of vLLM; see `actors` in the settings."""

    model: str
    """Hugging Face model directory or hub name."""
    max_model_len: int
    dtype: str = "float32"
    head_dtype: str | None = None
    """Data type of the logits; None = `dtype`."""
    max_concurrent: int = 256
    in_process: bool = True
    line: str = ""
    """Where the first worker of an engine in processes of its own connects, to be a member of
    weight groups (`actors/engine/weights`); empty = nowhere."""
    threads: int = 1
    """OpenMP threads on a CPU."""
    kv_cache_gib: int | None = None
    """KV cache, GiB; None = `CPU_KV_CACHE_GIB` on a CPU, on a GPU what vLLM finds free."""
    recompute_kv: bool = False
    """Whether running requests are prefilled anew after each swap."""
    gpu_memory_utilization: float = 0.85
    tensor_parallel_size: int = 1
    seed: int = 0
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, checked by `engine_args.check_engine_args`."""
    probe_temperature: float = 1.0
    """Temperature of the log-probs of probes; not 1 only where nothing is sampled."""


DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Pinned workers of several actors would share one core and leave the other idle.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # For weight groups that form in a worker (`actors/engine/weights`). torch reads it once, maybe
    # for a group of vLLM's, which ignores it.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(NCCL_FORMS_S),
    # Its processes are all on this machine. Our weight groups name their own interface.
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Environment variables that vLLM reads when it is imported or started."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""Environment variable of vLLM: how its processes begin."""
UUID_BYTES = 36  # names of the sockets between vLLM's processes
PRELOADS = "LD_PRELOAD"
COMPILES_NOTHING = "TORCH_COMPILE_DISABLE"
"""Environment variable of torch, which it reads once: `1` = `torch.compile` does nothing."""


def set_defaults() -> None:
    """Set the environment variables that vLLM reads when it is imported or later.

    What a person has set stays.
    """
    for name, value in {**DEFAULTS, **compiled_folders()}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder_of_sockets(UUID_BYTES)))


def prepare_environment(options: VllmOptions) -> None:
    """Set the environment variables that vLLM reads when it is started.

    What a person has set stays, except `VLLM_ENABLE_V1_MULTIPROCESSING`. Where the core is in this
    process, the number of torch's threads is set too; on a CPU compiling is turned off.
    """
    set_defaults()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.in_process else "1"
    os.environ.setdefault(METHOD, _method(options))
    if options.in_process:
        # For this thread the environment comes too late.
        torch.set_num_threads(options.threads)
    if engine_device() == "cpu":
        _compile_nothing(options.in_process)


def _method(options: VllmOptions) -> str:
    """Choose how vLLM's core begins: as a fork of this process, which has imported it, or anew.

    A new program imports it again, for 13 s of the start of an actor on an H200. After the fork
    vLLM opens its own sockets, and the core lets go of ours (`forks_let_go`); vLLM forks by itself,
    too, and spawns where torch has started CUDA. A core of several workers is spawned because
    of its threads.
    """
    return "spawn" if options.tensor_parallel_size > 1 or has_met_cuda() else "fork"


def _compile_nothing(in_process: bool) -> None:
    """Let vLLM run on a CPU as it is written, unless `TORCH_COMPILE_DISABLE` is 0.

    torch would compile one function, the rank of a log-prob. That asks for a C++ compiler, Python's
    headers and a path without blanks, takes 2 to 16 s of a start, and makes no token quicker
    (docs/performance.md). A variable set here would reach reward functions too, so it is set only
    where the core is a process of its own.
    """
    if not in_process:
        os.environ.setdefault(COMPILES_NOTHING, "1")
        return
    from torch._dynamo import config  # noqa: PLC0415 - it takes a second to import

    config.disable = os.environ.get(COMPILES_NOTHING, "1") == "1"


@contextmanager
def without_preloads() -> Iterator[None]:
    """Restore `LD_PRELOAD` at the end of the block, in which vLLM sets it and starts its processes.

    Every program that this process starts would load the library, and complain if its path has a
    blank.
    """
    before = os.environ.get(PRELOADS)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(PRELOADS, None)
        else:
            os.environ[PRELOADS] = before


def engine_arguments(options: VllmOptions) -> dict[str, Any]:
    """Make the arguments of vLLM's engine."""
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_concurrent,
        "tensor_parallel_size": options.tensor_parallel_size,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults out of the model's folder
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "actors.engine.weights.live_model.WorkerCalls",
    }
    if options.head_dtype is not None:
        arguments["hf_overrides"] = {"head_dtype": options.head_dtype}
    if engine_device() == "cuda":
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        if options.kv_cache_gib is not None:  # then it measures no free memory, which may change
            arguments["kv_cache_memory_bytes"] = options.kv_cache_gib * 2**30
        if not chooses_graphs(options.engine_args):
            arguments["cudagraph_capture_sizes"] = graph_sizes(options.max_concurrent)
    else:
        arguments |= {
            "enforce_eager": True,
            # Only whole blocks of a prompt are shared by its group, and vLLM's own have 128 tokens.
            "block_size": 32,
            "distributed_executor_backend": "uni" if options.in_process else "mp",
            "kv_cache_memory_bytes": (options.kv_cache_gib or CPU_KV_CACHE_GIB) * 2**30,
        }
    return arguments | dict(options.engine_args)


GRAPH_STEPS = ((8, 64), (16, 128), (32, 256), (64, 512))
"""Distance between sizes of CUDA graphs, and the size up to which it holds.

A step between two sizes is computed as the larger.
"""
GRAPHS_CHOSEN = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "performance_mode"}


def graph_sizes(max_concurrent: int) -> list[int]:
    """List the tokens of a step for which vLLM makes a CUDA graph when it starts.

    Steps that only decode have a token for each running request. Beyond these are sizes of steps
    that begin requests too, as far as vLLM goes by itself: twice the requests, at most 512. It
    makes 51 and 35 graphs for 256 requests, in 6 s on an H200, where these are 23 and 19.
    """
    most = min(2 * max_concurrent, GRAPH_STEPS[-1][1])
    sizes, last = [1, 2, 4], 0
    for step, until in GRAPH_STEPS:
        sizes += range(last + step, until + 1, step)
        last = until
    return sorted({size for size in sizes if size <= most} | {min(max_concurrent, most)})


def chooses_graphs(engine_args: Mapping[str, Any]) -> bool:
    """Whether a person has chosen the sizes of graphs, or that there are none."""
    config = engine_args.get("compilation_config")
    names = {*engine_args, *(config if isinstance(config, Mapping) else ())}
    return bool(engine_args.get("enforce_eager") or names & GRAPHS_CHOSEN)


def refused_arguments(arguments: Mapping[str, Any], error: Exception) -> str:
    """Return the text of the error with which vLLM's refusal of its arguments is reported."""
    reason = " ".join(str(error).split())[:500]
    return (
        f"actors.engine_args must be what vLLM's engine takes, got {dict(arguments)}, refused "
        f"with: {reason}; change what the refusal names"
    )
