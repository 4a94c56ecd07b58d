"""Reading back of the model that a worker of vLLM computes with, where there is no shadow copy.

As on a GPU: unquantised weights lie there as they were loaded, none of them packed and freed, and
the places of a version's tensors are recorded from the model itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.config import set_current_vllm_config

from actors.engine.wire_tensors import named_tensors

from .fill_plan import make_plan
from .loading import UpdateInfo, tensor_spec
from .shadow_model import KNOWN_METHODS, load_into
from .stored import stale_parameters


class LiveModel:
    """Methods that every worker has beside vLLM's (`worker_extension_cls`), called by name."""

    def nyala_read_back(self, update: dict[str, Any]) -> list[str] | None:
        """Name parameters that are not this version's; None where they cannot be read.

        Args:
            update: See `loading.update_payload`.

        Raises:
            WeightsError: the file is gone.
        """
        worker: Any = self
        model, place = worker.get_model(), UpdateInfo(**update)
        if not _stores_as_loaded(model):
            return None
        specs = [tensor_spec(entry) for entry in place.tensors]
        tensors = dict(named_tensors(Path(place.path), specs, place.num_bytes))
        with set_current_vllm_config(worker.vllm_config):
            plan = make_plan(model, specs, load_into)
        return None if plan is None else stale_parameters(model, plan, tensors)


def _stores_as_loaded(model: nn.Module) -> bool:
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    return all(parameter.numel() for parameter in model.parameters()) and all(
        method is None or type(method) in KNOWN_METHODS for method in methods
    )
