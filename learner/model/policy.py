"""The target policy: a Hugging Face causal language model, sharded with FSDP2, that scores tokens.

Owns sharding; `saved_model.py` reads the weights, `output_layer.py` turns hidden states into
log-probs. Losses, batches and the publication of weights lie elsewhere.

Sequences come packed, one after another without pads; `attention.py` keeps them apart.

Shapes: T tokens of all sequences of a microbatch, N of these that are scored, D model width.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from learner.algorithm.sequences import Sequences

from .activation_checkpointing import Kept, checkpoint_layers
from .attention import pack_attention, run_trunk, take
from .compilation import compile_layers
from .output_layer import output_layer, score_tokens, softmax_of
from .saved_model import layers_of
from .sequence_parallel import ALONE, Cut


class Scores(NamedTuple):
    """Log-probs, entropies and hidden states of the scored tokens."""

    logprobs_N: Tensor
    """log pi of each scored token at the sampling temperature, nats. Shape [N], float32."""
    entropies_N: Tensor
    """Entropy of the distribution that each token was drawn from, nats. Shape [N], float32."""
    states_MD: Tensor
    """Last hidden states from which this rank's M of the tokens are predicted. Shape [M, D]."""


class Policy(nn.Module):
    """Scores sampled tokens with a causal language model.

    The output layer runs inside `forward`, where FSDP2 has gathered its weights.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        pack_attention(causal_lm)
        self.sequence_group = ALONE
        """Ranks that share the tokens of a microbatch."""
        self.device = torch.device("cpu")
        """Where it computes; offloaded parameters lie elsewhere."""
        self.causal_lm = causal_lm
        self.softmax = softmax_of(causal_lm, temperature=temperature)
        self.vocabulary = int(causal_lm.config.vocab_size)

    def forward(
        self,
        sequences: Sequences,
        indices_N: Tensor,
        *,
        entropy_gradient: bool = False,
        temperature: float | None = None,
    ) -> Scores:
        """Score the tokens at `indices_N`, each of which has one before it.

        Args:
            sequences: The packed ones.
            indices_N: Tokens to score, of all T. Shape [N], int64.
            entropy_gradient: Let gradients flow through the entropies too.
            temperature: Of the softmax; None = the one that training episodes are sampled at.

        Returns:
            Log-probs, entropies and states of the scored tokens.
        """
        cut = Cut(self.sequence_group, sequences, indices_N)
        states_MD = states_before(self.causal_lm.base_model, sequences, cut)
        logprobs_M, entropies_M = score_tokens(
            output_layer(self.causal_lm),
            states_MD,
            cut.own_scores(sequences.token_ids_T.index_select(0, indices_N)),
            self.softmax if temperature is None else replace(self.softmax, temperature=temperature),
            entropy_gradient=entropy_gradient,
        )
        return Scores(cut.gather(logprobs_M), cut.gather(entropies_M), states_MD)


def states_before(trunk: nn.Module, sequences: Sequences, cut: Cut) -> Tensor:
    """Run a model without its output layer; the state before a token predicts it. Shape [M, D]."""
    return take(run_trunk(trunk, sequences, cut), cut.states_M)


def shard(
    policy: Policy,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    activations: Kept = "none",
    offload: Container[str] = (),
    compiled: bool = False,
) -> Policy:
    """Shard a policy over the ranks of `mesh` with FSDP2: each layer a unit, the rest one more.

    Args:
        policy: The whole policy, equal on every rank; weights may still be without memory.
        mesh: All ranks; its device is where parameters move. Of two dimensions, the first has
            copies of what the second shards.
        dtype: Of forward and backward passes. Gradients are reduced in float32 at least.
        activations: What each layer keeps for its backward pass.
        offload: What lies in host memory (`learner.offload`).
        compiled: Compile layers.
    """
    layers = layers_of(policy.causal_lm.base_model)
    if compiled:
        compile_layers(layers, mesh.device_type)
    checkpoint_layers(layers, activations, offload="activations" in offload)
    shard_units(policy, layers, mesh, dtype=dtype, offload="parameters" in offload)
    policy.device = torch.device(mesh.device_type)
    return policy


def shard_units(
    module: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    offload: bool = False,
) -> None:
    """Shard each of `layers` as a unit of its own, and the rest of `module` as one more."""
    is_pinned = mesh.device_type != "cpu"
    where = CPUOffloadPolicy(pin_memory=is_pinned) if offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
    )
    for unit in (*layers, module):  # a unit within another is sharded before it
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=where)
        sharded = cast("FSDPModule", unit)
        # Losses are already divided by counts over all ranks: sum gradients, do not average them.
        # Forced, because gloo has no scaled sum, not even with a factor of 1.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def freeze(policy: Policy) -> Policy:
    """Exclude all parameters of a policy from training, in place: it becomes the reference."""
    return policy.eval().requires_grad_(requires_grad=False)


def release(module: nn.Module) -> None:
    """Reshard gathered parameters after a forward pass that no backward pass follows.

    Without it the root would stay gathered, and the next optimizer step would change its shards
    only. Does nothing to a module that is not sharded.
    """
    if isinstance(module, FSDPModule):
        module.reshard()


@torch.no_grad()
def probe_logprobs(policy: Policy, token_ids: tuple[int, ...]) -> list[float]:
    """Score tokens 1.. of one sequence at temperature 1, nats; every rank must call it."""
    indices_N = torch.arange(1, len(token_ids), device=policy.device)
    scores = policy(Sequences.of([token_ids]).to(policy.device), indices_N, temperature=1.0)
    logprobs: list[float] = scores.logprobs_N.tolist()
    release(policy)
    return logprobs
