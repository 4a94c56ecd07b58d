"""Names of vLLM that it does not promise to keep: all that this folder uses of them.

`tests/actors/engine/test_vllm_private.py` holds each against the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
PACKED = "cpu_linear"
"""Attribute of a layer on a CPU: its multiplication, which holds a packed copy of its weight."""


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


def shut_down(engine: LLMEngine) -> None:
    """Stop the core, and its process where it has one."""
    engine.engine_core.shutdown()
