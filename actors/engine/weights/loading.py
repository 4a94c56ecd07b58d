"""Loading of a version through vLLM's own loader: its layerwise reload.

Each layer takes its tensors into new storage, is processed as at the start, and is copied over what
it had. So it knows any layout, and takes several times as long as the bytes. It loads versions that
have no plan (`fill_plan.py`); tests compare plans with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from actors.engine.vllm_private import RELOAD_LOGGER

KNOWN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods that compute with their parameters and `PACKED` alone."""

# It warns of every layer that takes nothing from the file: rotary tables, a tied output layer.
# Parameters that must not be missing are checked below.
logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)


def reload(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    model_config: ModelConfig,
    device: torch.device,
) -> str:
    """Load a version, every parameter's storage kept in place.

    Returns:
        An error text if not every parameter was loaded, else an empty one.
    """
    expected = begin_loading(model)
    try:
        return missing_in(expected, load_into(model, tensors))
    finally:
        end_loading(model, model_config, device)


def begin_loading(model: nn.Module) -> set[str]:
    """Make a model take checkpoint tensors; return the names of the parameters that take them."""
    in_use = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    # Some parameters in use are made of others; a tied output layer takes no tensor.
    return in_use & {name for name, _ in model.named_parameters()}


def load_into(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Call vLLM's loader; return the names of the parameters that it has loaded."""
    loader: Any = model
    loaded: set[str] = loader.load_weights(iter(tensors))
    return loaded


def end_loading(model: nn.Module, model_config: ModelConfig, device: torch.device) -> None:
    """Process the remaining layers and update derived copies."""
    finalize_layerwise_reload(model, model_config)
    if device.type == "cpu":
        refresh_output_layers(model)


def refresh_output_layers(model: nn.Module) -> None:
    """Pack the weights of output layers again.

    On a CPU such a layer multiplies with a packed copy of its weight. With tied embeddings no
    tensor is loaded into it, so the reload leaves its copy behind, and the engine would sample from
    new hidden states under the old output matrix.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def missing_in(expected: set[str], loaded: Iterable[str]) -> str:
    """Return an error text if not every parameter was loaded, else an empty one."""
    missing = sorted(expected - set(loaded))
    if not missing:
        return ""
    return (
        f"a policy version must hold every parameter of the actor's model, got no value for "
        f"{missing[:3]} ({len(missing)} in all), so it is of another model; start the actor with "
        "the config.yaml of the run"
    )


def other_layout(model: nn.Module) -> str:
    """Name a layer that computes with anything but its plain weights; empty = none."""
    for name, layer in model.named_modules():
        method: Any = getattr(layer, "quant_method", None)
        if method is not None and type(method) not in KNOWN_METHODS:
            return f"{name} keeps its weights as {type(method).__name__} does"
        if is_deferred_attention_layer(layer):
            kind: Any = type(layer)
            if kind.process_weights_after_loading is not Attention.process_weights_after_loading:
                return f"{name}, of {kind.__name__}, keeps what it computes from weights"
    return ""
