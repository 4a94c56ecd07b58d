"""Names of vLLM that it does not promise to keep: all that this folder uses of them.

`tests/actors/engine/test_vllm_private.py` holds each against the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine

CoreClient: TypeAlias = "SyncMPClient"
"""vLLM's client of a core in another process."""

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
PACKED = "cpu_linear"
"""Attribute of a layer on a CPU: its multiplication, which holds a packed copy of its weight."""
OUTPUTS_S = 2.0
"""Longest wait for outputs that a core sent before it died; they are read within milliseconds."""


def take_unsent(engine: LLMEngine) -> Iterable[tuple[int, list[int], list[float]]]:
    """Take the tokens that vLLM has made and would return with later ones.

    Yields:
        Request id, token ids and their log-probs, for each request that has some.
    """
    for state in engine.output_processor.request_states.values():
        made = state.detokenizer.output_token_ids[state.sent_tokens_offset :]
        if made:
            state.sent_tokens_offset += len(made)
            logprobs = state.logprobs_processor.logprobs[-len(made) :].logprobs
            yield int(state.external_req_id), made, logprobs


def has_outputs(engine: LLMEngine) -> bool:
    """Whether outputs of a core in another process have arrived and wait for `step`."""
    return not engine.engine_core.outputs_queue.empty()


def core_client(engine: LLMEngine) -> CoreClient:
    """Return the client of a core in another process."""
    client: CoreClient = engine.engine_core
    return client


def core_processes(client: CoreClient) -> list[BaseProcess]:
    """Return the processes of a core."""
    manager = client.resources.engine_manager
    return list(manager.processes)


def end_waits(client: CoreClient, error: Exception) -> None:
    """End what waits for a core that is gone: `step` behind all outputs that came, and calls."""
    # vLLM ends this thread when it sees the core gone; until then it may still read outputs.
    client.output_queue_thread.join(OUTPUTS_S)
    client.resources.engine_dead = True  # from here on a new call raises
    client.outputs_queue.put_nowait(error)
    for answer in list(client.utility_results.values()):
        if not answer.done():
            answer.set_exception(error)


def shut_down(engine: LLMEngine) -> None:
    """Stop the core, and its process where it has one."""
    engine.engine_core.shutdown()
