"""The model of a vLLM worker, written over and read back between two steps, and calls for that.

Storage stays where it is, since a card's CUDA graphs hold the addresses of parameters. Where every
tensor of a version becomes parts of parameters (`fill_plan.py`), these are copied out of the mapped
file straight into their storage, by the card itself and on a stream of its own. A model that keeps
its weights in another layout is loaded anew, layer by layer (`loading.py`).

The plan is made once. A file is opened, registered and viewed by a thread beside the steps, so that
the pause has the bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import convert, to_builtins
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config

from actors.engine.vllm_private import PACKED
from actors.engine.wire_tensors import PreparationState, VersionFile, named_tensors, tensors_in
from broker.protocol.manifest import TensorSpec
from configs.errors import EngineError, WeightsError
from configs.worker import Worker

from .fill_plan import FillPlan, make_plan
from .loading import load_into, other_layout, reload
from .pinned_files import PinnedFiles, pinned_files
from .stored import stale_parameters
from .worker_member import serve_actor

SHORT_S = 0.002
"""Wait for the opening thread; a file that was used before is open by then."""


class _OpenVersion(NamedTuple):
    """A version whose file is open, ready to be copied or loaded."""

    view: object
    """View of a registered file; None on a CPU."""
    tensors: dict[str, Tensor]
    parts: list[tuple[Tensor, Tensor]] | None
    """Parts of parameters, with their values; None = no plan."""


class LiveModel:
    """The weights of one worker's model.

    Args:
        model: The model in use.
        vllm_config: Configuration of the worker.
        device: Device of the model.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._files: PinnedFiles | None = None
        self._stream: torch.cuda.Stream | None = None
        self._obstacle = _packed_layer(model) or other_layout(model)
        """Why there is no plan; empty = there is one."""
        self._plan: FillPlan | None = None
        self._planned: tuple[TensorSpec, ...] = ()
        """Tensors that a plan was made for, or could not be."""
        self._place: VersionFile | None = None
        self._opened: _OpenVersion | None = None
        self._opening: Worker | None = None

    @property
    def way(self) -> str:
        """How the version that was prepared last is loaded."""
        if self._plan is None:
            return f"layer by layer: {self._obstacle}"
        return "copied into place"

    def prepare(self, place: VersionFile) -> bool:
        """Begin to open a version beside the steps, or wait briefly for it; True = it is open.

        Raises:
            WeightsError: The file is not a whole version.
        """
        if self._opening is None or self._place != place:
            self._settle()
            self._plan_for(place.tensors)
            self._place, self._opened = place, None
            self._opening = Worker(partial(self._open, place), name="weights-open").start()
        return self._settle(SHORT_S)

    def load(self) -> None:
        """Load what was prepared; no step may run.

        Raises:
            EngineError: A parameter got nothing; the model is now a mixture.
            WeightsError: The file is gone or not a whole version; the model did not change.
        """
        self._settle()
        assert self._place is not None
        if self._opened is not None and self._has_moved(self._place, self._opened):
            self._open(self._place)
        opened, self._place, self._opened = self._opened, None, None
        assert opened is not None
        if opened.parts is not None:
            self._copy(opened.parts)
            return
        with set_current_vllm_config(self._vllm_config):
            missing = self._reload(opened.tensors)
        if missing:
            # Half of the model is new by now: not a WeightsError, which would promise the old one.
            raise EngineError(missing)

    def read_back(self, place: VersionFile) -> list[str] | None:
        """Name parameters that are not this version's; None where they cannot be read.

        They cannot where the version is loaded layer by layer, or packed weights are too large.

        Raises:
            WeightsError: The file is gone.
        """
        plan = self._plan_for(place.tensors)
        if plan is None:
            return None
        tensors = dict(named_tensors(Path(place.path), place.tensors, place.num_bytes))
        return stale_parameters(self._model, plan, tensors)

    def _plan_for(self, specs: tuple[TensorSpec, ...]) -> FillPlan | None:
        if self._planned != specs:
            if not self._obstacle:
                with set_current_vllm_config(self._vllm_config):
                    self._plan = make_plan(self._model, specs, load_into)
            if self._plan is None:
                self._obstacle = self._obstacle or "its loader does more than copy parts of tensors"
            self._planned = specs
        return self._plan

    def _settle(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread that opens a file; True = the file is open.

        Raises:
            WeightsError: It is not a whole version.
        """
        opening = self._opening
        if opening is None:
            return True
        try:
            opening.join(timeout_s)
        finally:
            if not opening.is_alive:
                self._opening = None
        return not opening.is_alive

    @torch.no_grad()
    def _open(self, place: VersionFile) -> None:
        path, specs = Path(place.path), place.tensors
        view: object = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first card
            self._files = self._files or pinned_files(self._device)
            view = self._files.view(path, place.num_bytes)
            tensors = dict(tensors_in(view, specs, place.num_bytes))
        else:
            tensors = dict(named_tensors(path, specs, place.num_bytes))
        parts = (
            None if self._plan is None else list(_copies_by_plan(self._model, self._plan, tensors))
        )
        self._opened = _OpenVersion(view, tensors, parts)

    def _has_moved(self, place: VersionFile, opened: _OpenVersion) -> bool:
        """Whether a registered file was truncated since: a card would read its old pages."""
        files = self._files
        return files is not None and (
            files.view(Path(place.path), place.num_bytes) is not opened.view
        )

    @torch.no_grad()
    def _copy(self, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
        if self._device.type != "cuda":
            for into, value in parts:
                into.copy_(value)
            return
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for into, value in parts:
                into.copy_(value_for_card(value, into), non_blocking=True)
        stream.synchronize()  # it alone: a broadcast may be on its way to this card

    def _reload(self, tensors: dict[str, Tensor]) -> str:
        on_device = (
            (name, tensor.to(self._device, non_blocking=True)) for name, tensor in tensors.items()
        )
        missing = reload(self._model, on_device, self._vllm_config.model_config, self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return missing


def value_for_card(value: Tensor, into: Tensor) -> Tensor:
    """Return a value, of its own type, from which a card can fill its place by itself.

    One of the place's type and in one piece is returned as it is. A core would first copy any
    other, such as the columns of one worker of several. So the whole range in which it lies is
    copied to the card, and the value is returned as a view of that copy.
    """
    if value.dtype == into.dtype and value.is_contiguous():
        return value
    ends = zip(value.shape, value.stride(), strict=True)
    num_values = 1 + sum((size - 1) * stride for size, stride in ends)
    whole = value.as_strided((num_values,), (1,)).to(into.device, non_blocking=True)
    return whole.as_strided(value.shape, value.stride())


def _copies_by_plan(
    model: nn.Module, plan: FillPlan, tensors: dict[str, Tensor]
) -> Iterable[tuple[Tensor, Tensor]]:
    for name, parameter in model.named_parameters():
        for part, value in plan.parts(name, tensors):
            yield part.inside(parameter.data), value


def _packed_layer(model: nn.Module) -> str:
    layer: Any
    for name, layer in model.named_modules():
        if PACKED in vars(layer) and not layer.weight.numel():
            return f"{name} is packed for this CPU"
    return ""


# --------------------------------------------------------------------------------------------------
# Calls of an actor, which vLLM carries to all of its workers as plain values.


class WorkerCalls:
    """Methods that every worker has beside vLLM's (`worker_extension_cls`), called by name."""

    _live_model: LiveModel | None = None

    def nyala_serve(self, line: str) -> None:
        """Make the first worker a member of weight groups; all workers load the same file."""
        worker: Any = self
        if line and worker.vllm_config.parallel_config.rank == 0:
            serve_actor(line, str(worker.device))

    def nyala_divide_logits(self, temperature: float) -> None:
        """Divide all logits by a temperature: vLLM applies none to the log-probs of prompts."""
        worker: Any = self
        model = worker.get_model()
        compute = model.compute_logits

        def divided(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            return None if logits is None else logits.float() / temperature

        model.compute_logits = divided

    def nyala_prepare(self, update: dict[str, Any]) -> dict[str, Any]:
        """Begin to open a version; return how far this worker is with it.

        Returns:
            A `PreparationState` in plain values; a bad file is its `fault`, not an error.
        """
        model = self._nyala_model()
        try:
            is_ready = model.prepare(convert(update, VersionFile))
            prepared = PreparationState(is_ready, model.way)
        except WeightsError as error:
            prepared = PreparationState(True, "", str(error))
        values: dict[str, Any] = to_builtins(prepared)
        return values

    def nyala_load(self) -> None:
        """Load the version that was prepared; raises as `LiveModel.load` does."""
        self._nyala_model().load()

    def nyala_read_back(self, update: dict[str, Any]) -> list[str] | None:
        """Name parameters that are not this version's; returns and raises as `LiveModel` does."""
        return self._nyala_model().read_back(convert(update, VersionFile))

    def _nyala_model(self) -> LiveModel:
        if self._live_model is None:
            worker: Any = self
            self._live_model = LiveModel(worker.get_model(), worker.vllm_config, worker.device)
        return self._live_model
