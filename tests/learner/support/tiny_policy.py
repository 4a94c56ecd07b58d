"""A model small enough that a step takes milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from actors.engine.character_tokenizer import make_tokenizer
from learner.model.policy import Policy, shard
from learner.model.tensor_parallel import UNDIVIDED, TensorGroup
from learner.training.optimizer import Schedule, ScheduledOptimizer

VOCABULARY = 20


def tiny_causal_lm(
    *,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    tied: bool = True,
    layers: int = 2,
    kv_heads: int = 1,
    width: int = 32,
) -> Qwen3ForCausalLM:
    """Make a Qwen3 of some ten thousand parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        head_dim=width // 2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,  # so that distributions are far from uniform
    )
    return Qwen3ForCausalLM(config)


def tiny_policy(
    mesh: DeviceMesh | None = None,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    kv_heads: int = 1,
    tensor: TensorGroup = UNDIVIDED,
) -> Policy:
    """Make a policy; sharded if there is a mesh, its matrices divided if there are ranks for it."""
    policy = Policy(tiny_causal_lm(seed=seed, kv_heads=kv_heads), temperature=temperature)
    return policy if mesh is None else shard(policy, mesh, dtype=torch.float32, tensor=tensor)


def constant_rate(rate: float) -> Schedule:
    """Make a schedule without warm-up and decay."""
    return Schedule(peak=rate, warmup_steps=0, decay="constant", min_ratio=1.0, steps=1000)


def save_tiny_model(folder: Path, *, seed: int = 0, width: int = 32) -> PreTrainedTokenizerFast:
    """Write a model directory whose tokenizer knows every printable character."""
    tokenizer = make_tokenizer([])
    causal_lm = tiny_causal_lm(seed=seed, vocabulary=len(tokenizer), width=width)
    causal_lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def parameters_of(policy: Policy, optimizer: ScheduledOptimizer) -> list[torch.Tensor]:
    """Copy all parameters and moments of this rank."""
    tensors = [parameter.detach() for parameter in policy.parameters()]
    for parameter in optimizer.parameters:
        tensors += [moment for _, moment in sorted(optimizer.moments_of(parameter).items())]
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]
