"""Plan of a fill: which part of which parameter each tensor of a version becomes.

vLLM's loader puts one tensor after the other into its place, and counts, wraps and copies in Python
on the way. Where they end up is the same each time, so it is recorded once: the loader runs over
tensors without contents, and its copies are noted instead of made. They may be shards of a tensor
or of a fused parameter. Where it does anything but copy there is no plan, and the loader goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.engine.wire_tensors import TORCH_DTYPES
from broker.protocol.manifest import TensorSpec

Load = Callable[[nn.Module, Iterable[tuple[str, Tensor]]], object]

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Operations that set the rows of padding to zero."""


class StridedView(NamedTuple):
    """A part of a tensor, as `torch.as_strided` takes it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_view(cls, view: Tensor) -> StridedView:
        """Describe a view of a tensor that begins its storage."""
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset()))

    def inside(self, whole: Tensor) -> Tensor:
        """Return this part of a contiguous tensor."""
        return whole.as_strided(self.size, self.stride, self.offset + whole.storage_offset())


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """A part of a parameter, and the part of a version's tensor that is copied into it."""

    place: StridedView
    tensor: str
    source: StridedView


class FillPlan:
    """The pieces that make up every parameter.

    Args:
        pieces: Pieces of each parameter, by its name.
        shapes: Shapes of the parameters.
    """

    def __init__(
        self, pieces: Mapping[str, Sequence[ParameterPiece]], shapes: Mapping[str, torch.Size]
    ) -> None:
        self._pieces = pieces
        self.shapes = shapes

    def parts(
        self, parameter: str, tensors: Mapping[str, Tensor]
    ) -> Iterable[tuple[StridedView, Tensor]]:
        """Yield each part of a parameter with its value."""
        for piece in self._pieces[parameter]:
            yield piece.place, piece.source.inside(tensors[piece.tensor])

    def whole(self, parameter: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a parameter, zeros where it is padded; a view where it is all of one tensor."""
        shape, parts = self.shapes[parameter], list(self.parts(parameter, tensors))
        if len(parts) == 1 and parts[0][1].shape == shape:
            return parts[0][1]
        value = torch.zeros(shape, dtype=parts[0][1].dtype)
        self.copy(parameter, tensors, value)
        return value

    def copy(self, parameter: str, tensors: Mapping[str, Tensor], into: Tensor) -> None:
        """Copy a parameter into its place."""
        for place, value in self.parts(parameter, tensors):
            place.inside(into).copy_(value)


@torch.no_grad()
def make_plan(model: nn.Module, specs: Sequence[TensorSpec], load: Load) -> FillPlan | None:
    """Record the places of a version's tensors.

    Args:
        model: A model not yet processed for its kernels; its padding may be set to zero.
        specs: Tensors of a version.
        load: vLLM's loader.

    Returns:
        None where the loader does anything but copy, leaves a tensor unused, or leaves a parameter
        without a part or with parts that overlap.
    """
    # Never written to, they take no memory; all live on, so that each has a storage of its own.
    tensors = [(spec.name, torch.empty(spec.shape, dtype=_dtype(spec))) for spec in specs]
    recorder = _Recorder(dict(model.named_parameters()), dict(tensors))
    with recorder:
        load(model, iter(tensors))
    return recorder.plan()


def _dtype(spec: TensorSpec) -> torch.dtype:
    return TORCH_DTYPES[spec.dtype]


class _Recorder(TorchDispatchMode):
    """Notes copies from tensors into parameters instead of executing them."""

    def __init__(self, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._parameter_at = {_storage(value): name for name, value in parameters.items()}
        self._tensor_at = {_storage(value): name for name, value in tensors.items()}
        self._pieces: dict[str, dict[StridedView, ParameterPiece]] = {
            name: {} for name in parameters
        }
        self._is_exact = len(self._parameter_at) == len(parameters)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note a copy; mark the plan as inexact after other changes to tensors or parameters."""
        del types
        values = tree_leaves((args, kwargs))
        storages = [_storage(value) for value in values if isinstance(value, Tensor)]
        into = self._parameter_at.get(storages[0]) if storages else None
        if func is _COPY and into is not None and storages[1] in self._tensor_at:
            place, value = args[0], args[1]
            piece = ParameterPiece(
                StridedView.from_view(place),
                self._tensor_at[storages[1]],
                StridedView.from_view(value),
            )
            self._pieces[into][piece.place] = piece
            self._is_exact &= place.shape == value.shape
            return place
        is_ours = any(at in self._tensor_at or at in self._parameter_at for at in storages)
        is_padding = func in _FILLS and not any(args[1:])
        self._is_exact &= func.is_view or is_padding or not is_ours
        return func(*args, **(kwargs or {}))

    def plan(self) -> FillPlan | None:
        """Return the recorded plan; None where copies are missing or parts overlap."""
        if not self._is_exact:
            return None
        for name, pieces in self._pieces.items():
            if not pieces or sum(map(_numel, pieces)) > self._parameters[name].numel():
                return None
        used = Counter(
            piece.tensor for pieces in self._pieces.values() for piece in pieces.values()
        )
        if len(used) < len(self._tensor_at):
            return None
        recorded = {name: tuple(pieces.values()) for name, pieces in self._pieces.items()}
        return FillPlan(recorded, {name: value.shape for name, value in self._parameters.items()})


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _numel(part: StridedView) -> int:
    return torch.Size(part.size).numel()
