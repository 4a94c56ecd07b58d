"""The bytes of a model in its wire form: tensors whole, in one fixed order, in the publish dtype.

A matrix that is trained by an adapter is published merged: engines load plain weights.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from broker.protocol.manifest import AdapterSpec, TensorSpec

from .layout import ADAPTER, DTYPES, published


@runtime_checkable
class Merging(Protocol):
    """A module whose parameter `weight` is published with an adapter added to it."""

    scale: float
    """Factor of the product of its `lora_b` and `lora_a`."""

    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the weight with the adapter; sharded if the weight is."""
        ...

    def base(self, dtype: torch.dtype) -> Tensor:
        """Return the weight without the adapter; sharded if the weight is."""
        ...


Adapted: TypeAlias = Mapping[int, nn.Module]
"""Identity of each weight that is published merged -> its `Merging` module."""
NONE_ADAPTED: Adapted = MappingProxyType({})


def adapted_weights(model: nn.Module) -> Adapted:
    """Find the weights of a model that are published merged; once, as it visits every module."""
    return {
        id(module.get_parameter("weight")): module
        for module in model.modules()
        if isinstance(module, Merging)
    }


def gather(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    memory: mmap.mmap | None,
    *,
    merging: Adapted = NONE_ADAPTED,
) -> None:
    """Write the tensors into `memory`. Collective; only rank 0 has memory.

    Args:
        model: The published one.
        specs: Places of the tensors, from `layout`.
        memory: Memory for the wire bytes.
        merging: Weights that get their adapters; with none these are the bytes of the base.
    """
    whole = whole_tensors(model, specs[0].dtype, merging=merging)
    for spec, tensor in zip(specs, whole, strict=True):
        if memory is not None:
            flat = torch.frombuffer(
                memory, dtype=tensor.dtype, count=tensor.numel(), offset=spec.offset
            )
            flat.copy_(tensor.reshape(-1), non_blocking=True)
    if memory is not None and torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # a card copies to registered memory by itself


@torch.no_grad()
def whole_tensors(
    model: nn.Module, dtype: str, *, merging: Adapted = NONE_ADAPTED
) -> Iterator[Tensor]:
    """Yield the tensors in wire order; collective, and to be taken to the end.

    One at a time is whole, in the publish dtype, so the peak is that of the largest tensor. Weights
    in `merging` have their adapters added; all others with an adapter are those of the base.
    """
    frozen = NONE_ADAPTED if merging else adapted_weights(model)
    for _, parameter in published(model):
        whole = parameter.detach()
        if (module := merging.get(id(parameter))) is not None:
            whole = cast("Merging", module).merged(DTYPES[dtype])
        elif (module := frozen.get(id(parameter))) is not None:
            whole = cast("Merging", module).base(DTYPES[dtype])
        yield whole_of(whole, DTYPES[dtype])


@torch.no_grad()
def gather_adapter(model: nn.Module, base: str, merging: Adapted) -> tuple[AdapterSpec, bytes]:
    """Gather the adapters of a model in float32, and describe them; collective.

    Args:
        model: The published one.
        base: Digest of its wire bytes without them.
        merging: Weights that have one.
    """
    places, parts, rank, scale = [], [], 0, 0.0
    for place, (_, parameter) in enumerate(published(model)):
        if (module := merging.get(id(parameter))) is None:
            continue
        places.append(place)
        rank, scale = module.get_parameter("lora_a").shape[0], cast("Merging", module).scale
        for name in ADAPTER:
            whole = whole_of(module.get_parameter(name).detach(), torch.float32)
            parts.append(whole.cpu().contiguous().numpy().tobytes())
    adapter = b"".join(parts)
    return AdapterSpec(base, rank, scale, len(adapter), tuple(places)), adapter


def whole_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather a tensor in a dtype; collective."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
        tensor = tensor.to_local()  # all of it; torch takes five times as long to find that out
    if isinstance(tensor, DTensor):
        # An offloaded one is cast and gathered by the cards, too.
        on_card = tensor.to(device=tensor.device_mesh.device_type, dtype=dtype)
        return _whole_of_parts(cast("DTensor", on_card))
    return tensor.to(dtype)


def _whole_of_parts(tensor: DTensor) -> Tensor:
    """Gather a sharded tensor, then the parts of a matrix that ranks divide."""
    *sharded, last = tensor.placements
    if sharded:
        tensor = tensor.redistribute(placements=[*(Replicate() for _ in sharded), last])
    return tensor.full_tensor()
