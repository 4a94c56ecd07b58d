"""Loading of staged weights into vLLM's workers, through its own weight-transfer interface.

The engine is registered as `nyala` (entry point `vllm.general_plugins`, so that workers in
processes of their own have it too). An update carries only the path of a staged file and its
layout, as plain JSON values; every worker maps the file and takes its shard. Transport, digest and
version are settled before.

A swap: `start_weight_update` -> one `update_weights` -> `finish_weight_update`, between two steps.
On a CPU the same steps fill a copy of the model instead (`shadow_model.py`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict
from torch import nn
from vllm.config import ModelConfig
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

from actors.engine.engine import StagedWeights
from actors.engine.vllm_private import RELOAD_LOGGER
from actors.engine.wire_tensors import named_tensors, tensors_in
from broker.protocol.manifest import TensorSpec
from configs.errors import EngineError

from .pinned_files import PinnedFiles, pinned_files
from .worker_member import serve_actor

BACKEND = "nyala"

# It warns of every layer that takes nothing from the file: rotary tables, a tied output layer.
# Parameters that must not be missing are checked below.
logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)


@functools.cache  # vLLM refuses a second registration; plugin and direct call may both come
def register() -> None:
    """Register the `nyala` engine with vLLM in this process."""
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
    """Place of the actor, see `actors/engine/weights`."""

    line: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Place of a whole policy version, see `update_payload`."""

    path: str
    num_bytes: int
    tensors: list[dict[str, Any]] = field(default_factory=list)


class NyalaWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a staged file into the model of one worker, its parameters' storage kept in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _files: PinnedFiles | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Let the first worker be a member of weight groups, for all: they load the same file."""
        if init_info.line and self.parallel_config.rank == 0:
            serve_actor(init_info.line, str(self.device))

    def start_weight_update(self) -> None:
        """Make the model take checkpoint tensors; no forward may run until `finish`."""
        self._expected = begin_loading(self.model)

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
        loaded = self.model.load_weights(self._tensors(update_info))
        missing = missing_in(self._expected, loaded)
        if missing:
            # Half of the model is new by now: not a WeightsError, which would promise the old one.
            raise EngineError(missing)

    def finish_weight_update(self) -> None:
        """Process the remaining layers and update derived copies."""
        end_loading(self.model, self.model_config, self.device)

    def shutdown(self) -> None:
        """Let go of the files."""
        if self._files is not None:
            self._files.close()
            self._files = None

    def _tensors(self, update_info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor on the device); a card copies them while the layers are loaded."""
        path, num_bytes = Path(update_info.path), update_info.num_bytes
        specs = [tensor_spec(entry) for entry in update_info.tensors]
        if self.device.type != "cuda":
            tensors = named_tensors(path, specs, num_bytes)
        else:
            self._files = self._files or pinned_files(self.device)
            tensors = tensors_in(self._files.view(path, num_bytes), specs, num_bytes)
        for name, tensor in tensors:
            yield name, tensor.to(self.device, non_blocking=True)


def begin_loading(model: nn.Module) -> set[str]:
    """Make a model take checkpoint tensors; return the names of its parameters."""
    expected = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    return expected


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
        f"a policy version must hold every parameter, got none for {missing[:3]} "
        f"({len(missing)} in all); the model would be a mixture of two versions"
    )


def tensor_spec(entry: dict[str, Any]) -> TensorSpec:
    """Return an entry of `update_payload`'s `tensors`."""
    return TensorSpec(**(entry | {"shape": tuple(entry["shape"])}))
