"""Second copy of vLLM's model on a CPU: filled beside the running steps, exchanged between two.

vLLM's reload of a model repacks each weight for the CPU's kernels, layer by layer: for the smallest
model it takes as long as several steps. Here it works on the copy, in another thread, and the pause
is for the exchange of references alone. The copy takes as much memory as the model. Used for
unquantised weights only: there it is certain what loading changes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from configs.errors import WeightsError

from .engine import StagedWeights
from .vllm_private import PACKED
from .vllm_weights import begin_loading, end_loading, missing_in
from .wire_tensors import named_tensors

KNOWN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods that compute with their parameters and `PACKED` alone."""


class ShadowModel:
    """The next weights of one worker's model."""

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._model = model
        self._model_config = vllm_config.model_config
        self._device = torch.device("cpu")
        config = copy.copy(vllm_config)  # attention layers register themselves in it, by name
        config.compilation_config = copy.copy(vllm_config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with set_default_torch_dtype(self._model_config.dtype), self._device:
            self._shadow = initialize_model(config)
            _leave_out_shared(self._shadow, set(model.modules()))
            process_weights_after_loading(self._shadow, self._model_config, self._device)
        self._is_whole = False

    def fill(self, staged: StagedWeights) -> None:
        """Load a version into the copy.

        Raises:
            WeightsError: the file is not a whole version of this model; the old weights go on.
        """
        manifest, self._is_whole = staged.manifest, False
        tensors = list(named_tensors(staged.path, manifest.tensors, manifest.num_bytes))
        expected = begin_loading(self._shadow)
        try:
            missing = missing_in(expected, self._shadow.load_weights(iter(tensors)))
        finally:
            end_loading(self._shadow, self._model_config, self._device)
        if missing:
            raise WeightsError(missing)
        self._is_whole = True

    def exchange(self) -> None:
        """Exchange the two; nothing is copied, so no size of model makes it longer."""
        assert self._is_whole
        for ours, theirs in zip(self._model.parameters(), self._shadow.parameters(), strict=True):
            ours.data, theirs.data = theirs.data, ours.data
        for name, layer in self._model.named_modules():
            if PACKED in vars(layer):
                other, packed = self._shadow.get_submodule(name), getattr(layer, PACKED)
                setattr(layer, PACKED, getattr(other, PACKED))
                setattr(other, PACKED, packed)
        self._is_whole = False


def _leave_out_shared(shadow: nn.Module, layers: set[nn.Module]) -> None:
    """Take out what vLLM keeps once for all models, a rotary table: a reload would empty it."""
    for parent in list(shadow.modules()):
        for name, child in parent.named_children():
            if child in layers and parent not in layers:
                setattr(parent, name, nn.Identity())


def shadow_of(worker: Any) -> ShadowModel | None:
    """Make a shadow of a worker's model; None where a swap has to happen in place."""
    model = worker.get_model()
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    if all(method is None or type(method) in KNOWN_METHODS for method in methods):
        return ShadowModel(model, worker.vllm_config)
    return None
