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


def test_a_client_knows_the_processes_of_its_core_and_the_calls_that_wait_for_it() -> None:
    from vllm.v1.engine.core_client import BackgroundResources, MPClient, SyncMPClient
    from vllm.v1.engine.utils import CoreEngineProcManager

    assert {"engine_dead", "engine_manager"} <= set(BackgroundResources.__annotations__)
    assert {"resources", "utility_results"} <= names_in(MPClient.__init__)
    assert "output_queue_thread" in names_in(SyncMPClient.__init__)
    assert "processes" in names_in(CoreEngineProcManager.__init__)
    assert {"utility_results", "result"} <= names_in(SyncMPClient.call_utility)
    assert "engine_dead" in names_in(MPClient.ensure_alive)


def test_tokens_of_a_step_have_a_default_for_a_batch_alone() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    defaults, _ = EngineArgs.get_batch_defaults(1)

    assert defaults[UsageContext.LLM_CLASS] > 2048
    assert UsageContext.ENGINE_CONTEXT not in defaults


def test_a_layer_on_a_cpu_has_its_packed_weight_in_its_multiplication() -> None:
    from vllm.model_executor.layers.utils import cpu_unquantized_gemm

    assert PACKED in names_in(cpu_unquantized_gemm)


def test_the_logger_that_is_silenced_is_that_of_the_reload() -> None:
    assert importlib.util.find_spec(RELOAD_LOGGER) is not None
