"""TRL's colocated vLLM on a CPU, for which it needs three replacements; all of them are here.

TRL loads weights tensor by tensor, which vLLM's packed weights of a CPU refuse: they are reloaded
layer by layer, as our actors do. Kernels are compiled by nobody (`enforce_eager`), which takes
minutes of a start, and the engine computes in float32, as TRL trains.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from actors.engine.vllm_options import set_defaults

SETTINGS = {"use_vllm": True, "vllm_mode": "colocate"}
"""Of `GRPOConfig`."""


def prepare() -> None:
    """Set what vLLM reads when it is imported, and what TRL hands to it."""
    set_defaults()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from trl.generation import vllm_generation  # type: ignore[import-not-found]

    eager = partial(vllm_generation.LLM, enforce_eager=True, dtype="float32")
    vllm_generation.LLM = eager


def reload_by_layers(trainer: Any) -> None:
    """Replace how a trainer brings its weights to its engine."""
    from actors.engine.weights.loading import begin_loading, end_loading

    generation = trainer.vllm_generation
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner

    def sync_weights() -> None:
        begin_loading(runner.model)
        runner.model.load_weights(generation._iter_named_params())
        end_loading(runner.model, runner.model_config, torch.device("cpu"))
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights
