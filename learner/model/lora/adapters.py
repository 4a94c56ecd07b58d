"""The adapters of a model: made, begun, and what identifies them.

    adapt             linear layers of the transformer layers get adapters; all else is frozen
    begin_adapters    their first values, once the base has its weights
    Adapter           rank, alpha and the digest of the base: what a checkpoint of them fits

Owns the choice of what is trained. Merging lies in `adapted_linear.py`, bytes on the wire in
`learner/weights`.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from broker.protocol.manifest import digest_of
from configs.errors import SettingsError
from configs.settings import LearnerSettings
from learner.model.ranks import Ranks
from learner.model.saved_model import layers_of
from learner.model.tensor_files import box_of, local_of
from learner.weights.wire.gather import whole_tensors
from learner.weights.wire.layout import DTYPES, unwrapped_name

from .adapted_linear import AdaptedLinear


@dataclass(frozen=True, slots=True)
class Adapter:
    """Identity of a model's adapters: values for another one mean something else."""

    rank: int
    alpha: float
    base: str
    """Digest of the wire bytes of the frozen model."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


def adapt(causal_lm: PreTrainedModel, settings: LearnerSettings) -> None:
    """Give each linear module of the layers an adapter and freeze the rest, in place.

    Args:
        causal_lm: Before it is sharded, with memory or without.
        settings: Rank and scale; of rank 0 nothing is adapted.

    Raises:
        SettingsError: There is nothing to adapt.
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
        if not parameter.requires_grad:
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
    return Adapter(settings.lora_rank, alpha_of(settings), base)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, as they are digested."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view
