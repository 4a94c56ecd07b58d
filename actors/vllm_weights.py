"""Staged weights into vLLM's workers, through vLLM's own weight-transfer interface.

The engine is registered as `nyala` (entry point `vllm.general_plugins`, so that workers in
processes of their own know it too). An update carries only the path of a staged file and its
layout, as plain JSON values; every worker maps the file and takes its shard. Transport, digest and
version are not its business.

A swap: `start_weight_update` -> one `update_weights` -> `finish_weight_update`, between two steps.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from broker.manifest import TensorSpec
from configs.errors import EngineError

from .engine import StagedWeights
from .staging import named_tensors

BACKEND = "nyala"

# It warns of every layer that takes nothing from the file: rotary tables, a tied output layer. What
# must not be missing is checked below.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@functools.cache  # vLLM refuses a second registration; plugin and direct call may both come
def register() -> None:
    """Tell vLLM of this process about the `nyala` engine."""
    WeightTransferEngineFactory.register_engine(BACKEND, NyalaWeightTransferEngine)


def update_payload(staged: StagedWeights) -> dict[str, Any]:
    """Return the update as JSON-able values, which is what vLLM carries to its workers."""
    return {
        "path": str(staged.path),
        "num_bytes": staged.manifest.num_bytes,
        "tensors": [asdict(spec) for spec in staged.manifest.tensors],
    }


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to set up: there is no connection to a trainer."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where a whole policy version lies, see `update_payload`."""

    path: str
    num_bytes: int
    tensors: list[dict[str, Any]] = field(default_factory=list)


class NyalaWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a staged file into the model of one worker, its parameters' storage kept in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: the file is all there is."""

    def start_weight_update(self) -> None:
        """Make the model take checkpoint tensors; no forward may run until `finish`."""
        self._expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the whole version; the base class would wait for an accelerator in any case."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every tensor of the file.

        Raises:
            EngineError: the file is not a whole version; the model is now a mixture.
        """
        specs = [_tensor_spec(entry) for entry in update_info.tensors]
        tensors = named_tensors(Path(update_info.path), specs, update_info.num_bytes)
        loaded = self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)
        missing = self._expected - set(loaded)
        if missing:
            # Half of the model is new by now: not a WeightsError, which would promise the old one.
            raise EngineError(
                f"a policy version must hold every parameter, got none for {sorted(missing)[:3]} "
                f"({len(missing)} in all); the model would be a mixture of two versions"
            )

    def finish_weight_update(self) -> None:
        """Process what is left and make derived copies follow."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_output_layers()

    def shutdown(self) -> None:
        """Hold nothing, release nothing."""

    def _refresh_output_layers(self) -> None:
        # On a CPU the output layer multiplies with a packed copy of its weight. With tied
        # embeddings no tensor is loaded into that layer, so the reload leaves its copy behind, and
        # the engine would sample from new hidden states under the old output matrix.
        if self.device.type != "cpu":
            return
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)


def _tensor_spec(entry: dict[str, Any]) -> TensorSpec:
    return TensorSpec(**(entry | {"shape": tuple(entry["shape"])}))
