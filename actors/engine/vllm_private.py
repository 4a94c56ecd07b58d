"""Private names of vLLM, which may change with any release: all that this folder uses.

`tests/actors/engine/test_vllm_private.py` checks each of them with the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypeAlias

from .waits import settle_with_error

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine

Sampling: TypeAlias = "SamplingParams"
CoreClient: TypeAlias = "SyncMPClient"
"""vLLM's client of a core; one in this process has `get_output`, `add_request` and
`abort_requests` alone."""

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
PACKED = "cpu_linear"
"""Attribute of a layer on a CPU: its multiplication, which holds a packed copy of its weight."""
OUTPUTS_S = 2.0
"""Longest wait for outputs that a core sent before it died; they are read within milliseconds."""


def import_model(model: str) -> None:
    """Import the class of a model here, and register it.

    vLLM asks a new program about a class that it has not met, and that program imports vLLM for
    most of a first start: an import might start CUDA, and a process that has cannot be forked.
    """
    from transformers import PreTrainedConfig  # noqa: PLC0415 - vLLM
    from vllm import ModelRegistry  # noqa: PLC0415 - vLLM

    config, _ = PreTrainedConfig.get_config_dict(model)
    for name in config.get("architectures") or ():
        if registered := ModelRegistry.models.get(name):
            ModelRegistry.register_model(name, registered.load_model_cls())


def new_request(
    name: str, token_ids: list[int], sampling: SamplingParams, salt: str
) -> EngineCoreRequest:
    """Make a request of the core; without priorities `arrival_time` has no effect."""
    from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415 - vLLM

    return EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=token_ids,
        sampling_params=sampling,
        pooling_params=None,
        mm_features=None,
        lora_request=None,
        data_parallel_rank=None,
        arrival_time=0.0,
        cache_salt=salt,
    )


def next_outputs(client: CoreClient) -> list[EngineCoreOutput]:
    """Run one step of a core in this process, or wait for a step of one in another.

    Raises vLLM's `EngineDeadError`, or the error of `end_waits`, where the core has died.
    """
    outputs: list[EngineCoreOutput] = client.get_output().outputs
    return outputs


def sampled_logprobs(output: EngineCoreOutput) -> list[float]:
    """Return log mu of the new tokens of a request, nats, from the first column."""
    if output.new_logprobs is None:
        return []
    logprobs: list[float] = output.new_logprobs.logprobs[:, 0].tolist()
    return logprobs


def prompt_logprobs(output: EngineCoreOutput) -> list[float]:
    """Return the log-probs of tokens 1.. of a prompt, nats."""
    assert output.new_prompt_logprobs_tensors is not None
    logprobs: list[float] = output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
    return logprobs


def has_outputs(engine: LLMEngine) -> bool:
    """Whether outputs of a core in another process have arrived and wait for `next_outputs`."""
    return not engine.engine_core.outputs_queue.empty()


def watch_cache(core: CoreClient, record: Callable[[float, int], None]) -> None:
    """Report the used share of the KV cache, and evicted requests, with the outputs of each step.

    The core must have been made with statistics.
    """
    from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs  # noqa: PLC0415 - vLLM

    take = core.get_output

    def watched() -> EngineCoreOutputs:
        outputs = take()
        events = [event.type for output in outputs.outputs for event in output.events or ()]
        if outputs.scheduler_stats is not None:
            evicted = events.count(EngineCoreEventType.PREEMPTED)
            record(outputs.scheduler_stats.kv_cache_usage, evicted)
        return outputs

    core.get_output = watched


def core_client(engine: LLMEngine) -> CoreClient:
    """Return the client of an engine's core."""
    client: CoreClient = engine.engine_core
    return client


def core_processes(client: CoreClient) -> list[BaseProcess]:
    """Return the processes of a core."""
    manager = client.resources.engine_manager
    return list(manager.processes)


def end_waits(client: CoreClient, error: Exception) -> None:
    """End all waits for a core that is gone: calls, and `step` after the last outputs."""
    # vLLM ends this thread when it sees the core gone; until then it may still read outputs.
    client.output_queue_thread.join(OUTPUTS_S)
    client.resources.engine_dead = True  # from here on a new call raises
    client.outputs_queue.put_nowait(error)
    for answer in list(client.utility_results.values()):
        settle_with_error(answer, error)


def shut_down(engine: LLMEngine) -> None:
    """Stop the core, and its process where it has one."""
    engine.engine_core.shutdown()
