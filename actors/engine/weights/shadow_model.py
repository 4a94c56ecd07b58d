"""Second copy of vLLM's model on a CPU: filled beside the running steps, exchanged between two.

vLLM's reload of a model repacks each weight for the CPU's kernels, layer by layer: for the smallest
model it takes as long as several steps. Here it works on the copy, in another thread, and the pause
is for the exchange of references alone. The copy takes as much memory as the model. Used for
unquantised weights only: there it is certain what loading changes.

The first version goes through vLLM's loader, later ones by a plan (`fill_plan.py`): the loader
takes several times as long as the packing of the weights, which is left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from actors.engine.engine import StagedWeights
from actors.engine.vllm_private import PACKED
from actors.engine.wire_tensors import named_tensors
from broker.protocol.manifest import TensorSpec
from configs.errors import WeightsError

from .fill_plan import FillPlan, make_plan
from .loading import load_into, other_layout, reload
from .stored import stale_parameters


class ShadowModel:
    """The next weights of one worker's model."""

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._model = model
        self._model_config = vllm_config.model_config
        self._device = torch.device("cpu")
        config = copy.copy(vllm_config)  # attention layers register themselves in it, by name
        config.compilation_config = copy.copy(vllm_config.compilation_config)
        self._config = config
        self._shared = set(model.modules())
        self._shadow = self._new_model()
        with set_default_torch_dtype(self._model_config.dtype), self._device:
            process_weights_after_loading(self._shadow, self._model_config, self._device)
        self._plan: FillPlan | None = None
        self._planned: tuple[TensorSpec, ...] = ()
        """Tensors that a plan was made for, or could not be."""
        self._is_whole = False

    def fill(self, staged: StagedWeights) -> None:
        """Load a version into the copy.

        Raises:
            WeightsError: the file is not a whole version of this model, or was overwritten; the old
                weights go on.
        """
        manifest, self._is_whole = staged.manifest, False
        tensors = dict(named_tensors(staged.path, manifest.tensors, manifest.num_bytes))
        if self._planned != manifest.tensors:
            self.load(tensors)  # which also refuses what is not a version of this model
            self._plan = self.plan_for(manifest.tensors)
            self._planned = manifest.tensors
        elif self._plan is None:
            self.load(tensors)
        else:
            self.copy(self._plan, tensors)
        staged.check_not_overwritten()
        self._is_whole = True

    def plan_for(self, specs: Sequence[TensorSpec]) -> FillPlan | None:
        """Find the places of a version's tensors; None where only the loader can place them."""
        return make_plan(self._new_model(), specs, load_into)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the copy through vLLM's loader.

        Raises:
            WeightsError: a parameter got nothing.
        """
        missing = reload(self._shadow, tensors.items(), self._model_config, self._device)
        if missing:
            raise WeightsError(missing)

    @torch.no_grad()
    def copy(self, plan: FillPlan, tensors: Mapping[str, Tensor]) -> None:
        """Fill the copy by a plan, and pack the weights of packed layers again."""
        for name, parameter in list(self._shadow.named_parameters()):
            if parameter.numel():
                plan.copy(name, tensors, parameter)
        for prefix, module in self._shadow.named_modules():
            layer: Any = module
            if PACKED in vars(layer):
                if not layer.weight.numel():  # packing has freed it, and does so again
                    weight = plan.whole(f"{prefix}.weight", tensors)
                    layer.weight = nn.Parameter(weight, requires_grad=False)
                layer.quant_method.process_weights_after_loading(layer)

    def read_back(
        self, tensors: Mapping[str, Tensor], moved: Callable[[], object]
    ) -> list[str] | None:
        """Name parameters in use that are not this version's; None where they cannot be read.

        They cannot where there is no plan, or packed weights are too large (`stored.py`).
        """
        if self._plan is None:
            return None
        return stale_parameters(self._model, self._plan, tensors, moved)

    def exchange(self) -> None:
        """Exchange model and copy by reference, in the same time for every size of model.

        A whole version must have been filled in since the last exchange.
        """
        assert self._is_whole
        for ours, theirs in zip(self._model.parameters(), self._shadow.parameters(), strict=True):
            ours.data, theirs.data = theirs.data, ours.data
        for name, layer in self._model.named_modules():
            if PACKED in vars(layer):
                other, packed = self._shadow.get_submodule(name), getattr(layer, PACKED)
                setattr(layer, PACKED, getattr(other, PACKED))
                setattr(other, PACKED, packed)
        self._is_whole = False

    def _new_model(self) -> nn.Module:
        config = self._config
        config.compilation_config.static_forward_context = {}
        with set_default_torch_dtype(self._model_config.dtype), self._device:
            model: nn.Module = initialize_model(config)
        _leave_out_shared(model, self._shared)
        return model


def _leave_out_shared(shadow: nn.Module, layers: set[nn.Module]) -> None:
    """Take out layers that models share, such as a rotary table: a reload would empty them."""
    for parent in list(shadow.modules()):
        for name, child in parent.named_children():
            if child in layers and parent not in layers:
                setattr(parent, name, nn.Identity())


def shadow_of(worker: Any) -> ShadowModel | None:
    """Make a shadow of a worker's model; None where a swap has to happen in place."""
    model = worker.get_model()
    return None if other_layout(model) else ShadowModel(model, worker.vllm_config)
