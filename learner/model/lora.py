"""Low-rank adapters: small trained matrices beside frozen ones."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import PreTrainedModel

from broker.protocol.manifest import digest_of
from broker.weights.low_rank import BLOCK, add_low_rank, round_by_place
from configs.errors import SettingsError
from configs.settings import LearnerSettings
from learner.weights.gather import whole_of, whole_tensors
from learner.weights.layout import DTYPES, unwrapped_name

from .frozen import frozen_product, pack, widen
from .memory_rules import FOUR_BIT_BLOCK
from .ranks import Ranks
from .saved_model import box_of, layers_of, local_of

# --------------------------------------------------------------------------------------------------
# A linear layer whose weight is frozen and changed by a low-rank adapter (LoRA).
#
# Formula: `y = W x + b + scale * B (A x)`; only A and B are trained. B is 0 at first, so the layer
# computes what it did before.
#
# The frozen weight may be kept in fewer bits (`frozen.py`); `y` is computed with these.
#
# Source: Hu et al. 2021, arXiv:2106.09685.
#
# Shapes: N outputs, M inputs, R rank.

BLOCK_ON_CARD = 2**26
"""Elements of a block of the merge on a GPU, where each operation has to be large."""


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter; its own tensors keep their names."""

    is_on = True
    """Whether the adapter takes part in `forward`."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = scale
        self.weight = linear.weight
        self.weight_scales: nn.Parameter | None = None
        """Scales of a weight in 4 bits."""
        self.bias = linear.bias
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))

    def pack(self) -> None:
        """Keep the weight in 4 bits from now on; call it before the weight is sharded."""
        parts = pack(self.weight.detach())
        self.weight, self.weight_scales = (nn.Parameter(p, requires_grad=False) for p in parts)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., M] to outputs [..., N]."""
        outputs = frozen_product(inputs, self.weight, self.weight_scales, self.bias)
        if not self.is_on:
            return outputs
        low = functional.linear(functional.linear(inputs, self.lora_a), self.lora_b)
        return torch.add(outputs, low, alpha=self.scale)

    @torch.no_grad()
    def base(self, dtype: torch.dtype) -> Tensor:
        """Return the weight without the adapter in a dtype; sharded as the weight is."""
        return self._sharded(self._rows().to(dtype))

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the weight with the adapter in a dtype; sharded as the weight is. Collective.

        Each rank merges its own rows: the same rows of B and of the weight are on one rank.
        """
        a_RM = whole_of(self.lora_a.detach(), self.lora_a.dtype)
        merged_NM, b_NR = self._rows().to(a_RM.dtype, copy=True), _on_card(self.lora_b)
        first = box_of(self.weight).offset[0]
        return self._sharded(self._merge(merged_NM, b_NR, a_RM.to(b_NR.device), dtype, first=first))

    def _rows(self) -> Tensor:
        """Return this rank's rows of the weight, at their widest, where they are gathered."""
        scales = None if self.weight_scales is None else _on_card(self.weight_scales)
        weight = _on_card(self.weight)
        return widen(weight, scales, weight.dtype if scales is None else torch.bfloat16)

    def _sharded(self, rows: Tensor) -> Tensor:
        """Shard rows as the weight is."""
        weight = self.weight
        if not isinstance(weight, DTensor):
            return rows
        return DTensor.from_local(
            rows,
            weight.device_mesh,
            weight.placements,
            shape=torch.Size([self.out_features, self.in_features]),
            stride=(self.in_features, 1),
        )

    def _merge(
        self, merged_NM: Tensor, b_NR: Tensor, a_RM: Tensor, dtype: torch.dtype, *, first: int
    ) -> Tensor:
        """Merge rows of the weight in place, of which the first has this number."""
        block = BLOCK_ON_CARD if merged_NM.is_cuda else BLOCK
        add_low_rank(merged_NM, b_NR, a_RM, scale=self.scale, block=block)
        if dtype == torch.bfloat16:
            rows, columns = merged_NM.shape
            numbers = torch.arange(max(first + rows, columns), dtype=torch.int32)
            numbers = numbers.to(merged_NM.device)
            places = numbers[first : first + rows], numbers[:columns]
            round_by_place(merged_NM.view(torch.int32), *places, block=block)
        return merged_NM.to(dtype)


def _on_card(tensor: Tensor) -> Tensor:
    """Move this rank's piece of an offloaded tensor to where it is gathered."""
    local = local_of(tensor)
    return local.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else local


# --------------------------------------------------------------------------------------------------
# The adapters of a model: how they are added, their first values, and their identity.
#
#     adapt             linear layers of the transformer layers get adapters; all else is frozen
#     begin_adapters    first values of adapters, once the base has its weights
#     Adapter           rank, alpha and the digest of the base that a checkpoint of adapters fits
#
# This module chooses what is trained; `learner/weights` has the bytes on the wire.


NARROWER = ("bfloat16", "float32")
"""`learner.base_dtype` and `run.dtype` of a base that is rounded further than it is published."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Identity of a model's adapters: their values fit no other base, rank or alpha."""

    rank: int
    alpha: float
    base: str
    """Digest of the wire bytes of the frozen model."""
    rounding: str | None = None
    """`learner.base_dtype` where it rounded the frozen model further than `run.dtype` does."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


def adapt(causal_lm: PreTrainedModel, settings: LearnerSettings, base: str | None = None) -> None:
    """Give each linear module of the layers an adapter and freeze the rest, in place.

    Args:
        causal_lm: A model that is not yet sharded, with memory or without.
        settings: Rank and scale; with rank 0 nothing is adapted.
        base: Data type of the rest, as `learner.base_dtype` says; None = as it is.

    Raises:
        SettingsError: There is nothing to adapt, or a matrix has no whole number of blocks.
    """
    if not settings.lora_rank:
        return
    causal_lm.requires_grad_(requires_grad=False)
    linears = [
        (parent, name, child)
        for layer in layers_of(causal_lm.base_model)
        for parent in layer.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    scale = alpha_of(settings) / settings.lora_rank
    for parent, name, linear in linears:
        setattr(parent, name, AdaptedLinear(linear, rank=settings.lora_rank, scale=scale))
    if not linears:
        raise SettingsError(
            "learner.lora_rank must be 0 for a model whose layers have no linear modules, got "
            f"{settings.lora_rank} for {type(causal_lm).__name__}; set learner.lora_rank to 0 to "
            "train its weights"
        )
    if base in {"bfloat16", "nf4"}:
        _narrow_base(causal_lm, is_packed=base == "nf4")


@torch.no_grad()
def _narrow_base(causal_lm: PreTrainedModel, *, is_packed: bool) -> None:
    """Keep frozen weights in bfloat16; with `is_packed`, adapted matrices in 4 bits."""
    for name, module in causal_lm.named_modules():
        if not is_packed or not isinstance(module, AdaptedLinear):
            continue
        if module.in_features % FOUR_BIT_BLOCK:
            raise SettingsError(
                "learner.base_dtype must be bfloat16 for a model with a matrix whose number of "
                f"columns {FOUR_BIT_BLOCK} does not divide, got nf4 and {module.in_features} "
                f"columns of {name}; set learner.base_dtype to bfloat16"
            )
        module.pack()
    for parameter in causal_lm.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters of a model off; a model without adapters computes as before."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True


def alpha_of(settings: LearnerSettings) -> float:
    """Fill in the default of `learner.lora_alpha`."""
    return 2.0 * settings.lora_rank if settings.lora_alpha is None else settings.lora_alpha


@torch.no_grad()
def reset_adapters(model: nn.Module) -> None:
    """Give adapters their first values, each rank its part: B = 0, and A drawn from its name.

    So every rank, and every restart of a run, begins with the same values, on any number of ranks.
    """
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            generator = torch.Generator().manual_seed(zlib.crc32(unwrapped_name(name).encode()))
            bound = module.in_features**-0.5
            whole = torch.empty(module.lora_a.shape).uniform_(-bound, bound, generator=generator)
            local = local_of(module.lora_a)
            places = zip(box_of(module.lora_a).offset, local.shape, strict=True)
            local.copy_(whole[tuple(slice(start, start + size) for start, size in places)])
            local_of(module.lora_b).zero_()


@torch.no_grad()
def begin_adapters(
    causal_lm: nn.Module, settings: LearnerSettings, *, dtype: str, ranks: Ranks
) -> Adapter | None:
    """Begin the adapters of a model whose weights have been read; None = it has none. Collective.

    Frozen weights are rounded to the publish dtype: actors merge the published weights, and a
    digest shows that they have the same ones.

    Args:
        causal_lm: The model that `adapt` has changed.
        settings: The settings that `adapt` was called with.
        dtype: Data type in which weights are published.
        ranks: All ranks of the learner; each calls this.
    """
    if not settings.lora_rank:
        return None
    for parameter in causal_lm.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            local = local_of(parameter)
            local.copy_(local.to(DTYPES[dtype]))
    reset_adapters(causal_lm)
    parts = (bytes_of(tensor) for tensor in whole_tensors(causal_lm, dtype))
    digest = None
    if ranks.is_first:
        digest = digest_of(parts, threads=settings.threads).encode()
    else:
        deque(parts, maxlen=0)
    base = ranks.broadcast(digest).decode()
    is_rounded = settings.base_dtype == "nf4" or (settings.base_dtype, dtype) == NARROWER
    rounding = settings.base_dtype if is_rounded else None
    return Adapter(settings.lora_rank, alpha_of(settings), base, rounding)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, as they are digested."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view
