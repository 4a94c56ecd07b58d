"""The private names of vLLM that the engine uses exist in the installed version."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from actors.engine.vllm_private import PACKED, RELOAD_LOGGER, new_request, sampled_logprobs

pytest.importorskip("vllm", reason="not installed: only the torch engine is tested here")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # vLLM and what it imports warn of themselves


def names_in(function: Callable[..., Any]) -> set[str]:
    """Attributes and globals that a function's own code mentions."""
    return set(inspect.unwrap(function).__code__.co_names)


def test_both_clients_of_a_core_take_requests_and_return_what_it_made() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core_client import InprocClient, SyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine

    assert "engine_core" in names_in(LLMEngine.__init__)
    for client in (InprocClient, SyncMPClient):
        for name in ("get_output", "add_request", "abort_requests"):
            assert name in vars(client)
    assert "outputs" in EngineCoreOutputs.__struct_fields__
    assert {
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "finish_reason",
    } <= set(EngineCoreOutput.__struct_fields__)


def test_a_request_for_the_core_has_what_it_was_given_and_else_defaults() -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    sampling = SamplingParams(max_tokens=3)
    request = new_request("7", [1, 2], sampling, "0")

    given = {"request_id", "external_req_id", "prompt_token_ids", "sampling_params", "cache_salt"}
    defaults = EngineCoreRequest("", None, None, None, None, 0.0, None, None, None)
    for name in EngineCoreRequest.__struct_fields__:
        if name not in given:
            assert getattr(request, name) == getattr(defaults, name), name
    assert (request.request_id, request.prompt_token_ids) == ("7", [1, 2])
    assert request.params is sampling
    assert request.cache_salt == "0"


def test_log_probs_of_sampled_tokens_are_the_first_column() -> None:
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    ids, logprobs = np.array([[5, 9], [6, 9]]), np.array([[-0.5, -0.25], [-1.5, -0.125]])
    made = LogprobsLists(ids, logprobs, np.array([1, 2]))

    assert sampled_logprobs(EngineCoreOutput("7", [5, 6], made)) == [-0.5, -1.5]
    assert sampled_logprobs(EngineCoreOutput("7", [])) == []


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


def test_outputs_of_a_step_say_how_full_the_cache_is_and_what_has_lost_its_own() -> None:
    from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.metrics.stats import SchedulerStats

    assert "PREEMPTED" in EngineCoreEventType.__members__
    assert "events" in EngineCoreOutput.__annotations__
    assert "scheduler_stats" in EngineCoreOutputs.__annotations__
    assert "kv_cache_usage" in SchedulerStats.__annotations__
    assert callable(EngineCoreClient.get_output)
