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
# The frozen weight may be kept in fewer bits (`frozen.py`); `y` is of the values that those mean.
#
# Source: Hu et al. 2021, arXiv:2106.09685.
#
# Shapes: N outputs, M inputs, R rank.

BLOCK_ON_CARD = 2**26
"""Of the merge on a GPU, where each operation has to be large."""


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter; its own tensors keep their names."""

    is_on = True
    """Its adapter counts."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = scale
        self.weight = linear.weight
        self.weight_scales: nn.Parameter | None = None
        """Of a weight in 4 bits."""
        self.bias = linear.bias
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))

    def pack(self) -> None:
        """Keep the weight in 4 bits from now on; before it is sharded."""
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

        Each rank merges its own rows: these of B are on the rank that has these of the weight.
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
# The adapters of a model: made, begun, and what identifies them.
#
#     adapt             linear layers of the transformer layers get adapters; all else is frozen
#     begin_adapters    their first values, once the base has its weights
#     Adapter           rank, alpha and the digest of the base: what a checkpoint of them fits
#
# Owns the choice of what is trained. Bytes on the wire lie in `learner/weights`.


NARROWER = ("bfloat16", "float32")
"""`learner.base_dtype` and `run.dtype` of a base that is rounded further than it is published."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Identity of a model's adapters: values for another one mean something else."""

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
        causal_lm: Before it is sharded, with memory or without.
        settings: Rank and scale; of rank 0 nothing is adapted.
        base: What the rest is kept in, as `learner.base_dtype` says; None = as it is.

    Raises:
        SettingsError: There is nothing to adapt, or a matrix that has no whole blocks of 4 bits.
    """
    if not settings.lora_rank:
        return
    causal_lm.requires_grad_(requires_grad=False)
    found = [
        (parent, name, child)
        for layer in layers_of(causal_lm.base_model)
        for parent in layer.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    scale = alpha_of(settings) / settings.lora_rank
    for parent, name, linear in found:
        setattr(parent, name, AdaptedLinear(linear, rank=settings.lora_rank, scale=scale))
    if not found:
        raise SettingsError(
            f"learner.lora_rank must be 0 for a model whose layers have no linear modules, got "
            f"{settings.lora_rank} for {type(causal_lm).__name__}; train its weights"
        )
    if base in {"bfloat16", "nf4"}:
        _narrow_base(causal_lm, is_packed=base == "nf4")


@torch.no_grad()
def _narrow_base(causal_lm: PreTrainedModel, *, is_packed: bool) -> None:
    """Keep what is frozen in bfloat16, and adapted matrices in 4 bits if they are to be packed."""
    for name, module in causal_lm.named_modules():
        if not is_packed or not isinstance(module, AdaptedLinear):
            continue
        if module.in_features % FOUR_BIT_BLOCK:
            raise SettingsError(
                f"learner.base_dtype must be bfloat16 for a model whose matrices have a number of "
                f"columns that {FOUR_BIT_BLOCK} does not divide, got nf4 with "
                f"{module.in_features} of {name}"
            )
        module.pack()
    for parameter in causal_lm.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute with what is frozen alone; one without adapters does so anyway."""
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

    So every rank, and every life of a run, begins with the same ones, as many ranks as there are.
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

    Frozen weights are rounded to the publish dtype: actors merge what was published, and a digest
    shows that they got the same.

    Args:
        causal_lm: As `adapt` left it.
        settings: The same.
        dtype: In which weights are published.
        ranks: All of them call it.
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
