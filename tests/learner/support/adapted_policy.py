"""A tiny policy with adapters, and what it publishes."""

from __future__ import annotations

import mmap

import torch
from torch import nn
from transformers import PreTrainedModel

from configs.settings import LearnerSettings
from learner.model.activations import Kept
from learner.model.lora import adapt, begin_adapters
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import local_of
from learner.training.optimizer import ScheduledOptimizer
from learner.weights.gather import NONE_ADAPTED, adapted_weights, gather
from learner.weights.layout import layout
from tests.learner.support.tiny_policy import VOCABULARY, constant_rate, tiny_causal_lm

SETTINGS = LearnerSettings(lora_rank=3, lora_alpha=5.0)
"""A scale that no power of two is."""
PACKED = SETTINGS.model_copy(update={"base_dtype": "nf4"})
WIDE = 64
"""Width of a tiny model whose matrices have whole blocks of 4 bits."""


def adapted_policy(
    ranks: Ranks,
    *,
    seed: int = 0,
    settings: LearnerSettings = SETTINGS,
    dtype: str = "float32",
    vocabulary: int = VOCABULARY,
    activations: Kept = "none",
    offload: tuple[str, ...] = (),
    causal_lm: PreTrainedModel | None = None,
    computes_in: torch.dtype = torch.float32,
) -> tuple[Policy, ScheduledOptimizer]:
    """Make a sharded policy with adapters, as the learner does; of a tiny model if of none."""
    width = WIDE if settings.base_dtype else 32
    causal_lm = causal_lm or tiny_causal_lm(seed=seed, vocabulary=vocabulary, width=width)
    adapt(causal_lm, settings, settings.base_dtype)
    policy = Policy(causal_lm, temperature=1.0).eval()
    policy.sequence_group = ranks.sequence
    shard(policy, ranks.mesh, dtype=computes_in, activations=activations, offload=offload)
    policy.adapter = begin_adapters(causal_lm, settings, dtype=dtype, ranks=ranks)
    return policy, ScheduledOptimizer(policy, constant_rate(1e-3), settings)


def published_bytes(
    model: nn.Module, dtype: str = "float32", *, is_merged: bool = True, is_first: bool = True
) -> bytes:
    """Gather the wire bytes of a model; collective."""
    specs = layout(model, dtype)
    memory = mmap.mmap(-1, specs[-1].offset + specs[-1].num_bytes) if is_first else None
    merging = adapted_weights(model) if is_merged else NONE_ADAPTED
    gather(model, specs, memory, merging=merging)
    return memory[:] if memory is not None else b""


def fill_adapters(model: nn.Module, *, seed: int = 3) -> None:
    """Give B values, so that adapters change something; of a model on one rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                whole = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                local_of(parameter).copy_(0.1 * whole)
