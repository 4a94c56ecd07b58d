"""The private names of vLLM that the engine uses exist in the installed version."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from actors.engine.vllm_private import PACKED, RELOAD_LOGGER

pytest.importorskip("vllm", reason="not installed: only the torch engine is tested here")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # vLLM and what it imports warn of themselves


def names_in(function: Callable[..., Any]) -> set[str]:
    """Attributes and globals that a function's own code mentions."""
    return set(inspect.unwrap(function).__code__.co_names)


def test_a_request_keeps_count_of_the_tokens_it_has_sent() -> None:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    state = {"detokenizer", "logprobs_processor", "sent_tokens_offset", "external_req_id"}
    assert names_in(RequestState.__init__) >= state
    assert "request_states" in names_in(OutputProcessor.__init__)
    assert names_in(LLMEngine.__init__) >= {"output_processor", "engine_core"}
    assert isinstance(IncrementalDetokenizer.output_token_ids, property)
    assert "logprobs" in LogprobsProcessor.__annotations__


def test_outputs_of_a_core_in_another_process_wait_in_a_queue() -> None:
    from vllm.v1.engine.core_client import EngineCoreClient, SyncMPClient

    assert "outputs_queue" in names_in(SyncMPClient.__init__)
    assert callable(EngineCoreClient.shutdown)


def test_a_layer_on_a_cpu_has_its_packed_weight_in_its_multiplication() -> None:
    from vllm.model_executor.layers.utils import cpu_unquantized_gemm

    assert PACKED in names_in(cpu_unquantized_gemm)


def test_the_logger_that_is_silenced_is_that_of_the_reload() -> None:
    assert importlib.util.find_spec(RELOAD_LOGGER) is not None
