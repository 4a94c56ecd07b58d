"""The target policy: a Hugging Face causal language model, sharded, that scores tokens.

Owns loading, FSDP2 and log-probs. Knows nothing of losses, batches or weights on the wire.

Sequences come right-padded: under a causal mask a pad never reaches the token before it, so no
attention mask is built and SDPA takes its fast causal path. Microbatches are sorted by length,
which keeps pads few.

Shapes: B episodes, T tokens (prompt, completion, pads), N scored tokens of the microbatch (flat), D
model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.errors import SettingsError

# Logits held at a time: 64 MiB in float32. Small vocabularies fit in one chunk and pay no
# recomputation.
CHUNK_LOGITS = 2**24


class Scores(NamedTuple):
    """What the target policy says of the scored tokens."""

    logprobs_N: Tensor
    """log pi of each scored token at the sampling temperature, nats. Shape [N], float32."""
    entropies_N: Tensor
    """Entropy of the distribution that each token was drawn from, nats. Shape [N], float32."""
    states_ND: Tensor
    """The last hidden state before each token, which is all that predicts it. Shape [N, D]."""


class Policy(nn.Module):
    """Scores sampled tokens with a causal language model.

    The output layer runs inside `forward`, so that FSDP2 has gathered its weights, and in chunks of
    tokens that are recomputed in the backward pass: a [T, V] tensor of logits never exists for a
    large V.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature
        self.vocabulary = int(causal_lm.config.vocab_size)
        self.chunk_tokens = max(1, CHUNK_LOGITS // self.vocabulary)

    def forward(
        self,
        token_ids_BT: Tensor,
        positions_N: Tensor,
        *,
        entropy_gradient: bool = False,
        temperature: float | None = None,
    ) -> Scores:
        """Score the tokens at `positions_N`, none of which is in the first column.

        Args:
            token_ids_BT: Right-padded sequences. Shape [B, T], int64.
            positions_N: Which tokens to score: b * T + t with t >= 1. Shape [N], int64.
            entropy_gradient: Let gradients flow through the entropies too.
            temperature: Of the distribution; None = that of the training episodes.

        Returns:
            Log-probs, entropies and states of the scored tokens.
        """
        states_ND = states_before(self.causal_lm.base_model, token_ids_BT, positions_N)
        targets_N = token_ids_BT.flatten().index_select(0, positions_N)

        score = partial(
            self._score,
            entropy_gradient=entropy_gradient,
            temperature=self.temperature if temperature is None else temperature,
        )
        if len(targets_N) <= self.chunk_tokens:
            return Scores(*score(states_ND, targets_N), states_ND)
        chunks = [
            checkpoint(score, states, targets, use_reentrant=False)
            for states, targets in zip(
                states_ND.split(self.chunk_tokens), targets_N.split(self.chunk_tokens), strict=True
            )
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return Scores(torch.cat(logprobs), torch.cat(entropies), states_ND)

    def _score(
        self, states_ND: Tensor, targets_N: Tensor, *, entropy_gradient: bool, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logits_NV = _output_layer(self.causal_lm)(states_ND)
        # bfloat16 has too few digits for a log-prob; float64 keeps its own.
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
        log_pi_NV = logits_NV.log_softmax(-1)
        logprobs_N = -functional.nll_loss(log_pi_NV, targets_N, reduction="none")
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies_N = -(log_pi_NV.exp() * log_pi_NV).sum(-1)
        return logprobs_N, entropies_N


def states_before(trunk: nn.Module, token_ids_BT: Tensor, positions_N: Tensor) -> Tensor:
    """Run a model without its output layer; the state before a token predicts it. Shape [N, D]."""
    assert token_ids_BT.ndim == 2 and positions_N.ndim == 1
    hidden_BTD: Tensor = trunk(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    return hidden_BTD.flatten(0, 1).index_select(0, positions_N - 1)


def load_causal_lm(path: str | Path) -> PreTrainedModel:
    """Load a causal language model in float32 on the CPU.

    Master weights stay in float32 on every device: steps of 1e-6 vanish in bfloat16. On a GPU,
    FSDP2 casts to bfloat16 for the forward and backward passes where `run.dtype` says so.

    Raises:
        SettingsError: There is no such model, or its logits are not its output layer's.
    """
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"run.model must be a Hugging Face model directory or hub name, got {str(path)!r}; "
            f"{str(error).splitlines()[0]}"
        ) from error
    _check_output_layer(causal_lm)
    return cast("PreTrainedModel", causal_lm)


def _output_layer(causal_lm: PreTrainedModel) -> nn.Module:
    layer = causal_lm.get_output_embeddings()
    assert isinstance(layer, nn.Module)  # a causal language model has one
    return layer


def _check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Refuse models that change logits after the output layer: chunked scores would be wrong."""
    token_ids_BT = torch.arange(1, 5)[None] % causal_lm.config.vocab_size
    with torch.no_grad():
        hidden_BTD = causal_lm.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        logits_BTV = _output_layer(causal_lm)(hidden_BTD)
        expected_BTV = causal_lm(input_ids=token_ids_BT, use_cache=False).logits
    if not torch.allclose(logits_BTV, expected_BTV, rtol=1e-4, atol=1e-4):
        raise SettingsError(
            "run.model must compute its logits with its output layer alone, got "
            f"{type(causal_lm).__name__}, which changes them afterwards; choose another model"
        )


def shard(policy: Policy, mesh: DeviceMesh, *, dtype: torch.dtype) -> Policy:
    """Shard a policy over the ranks of `mesh` with FSDP2: each layer a unit, the rest one more.

    Args:
        policy: The whole policy, equal on every rank.
        mesh: One dimension over all ranks; its device is where parameters move.
        dtype: Of the forward and backward passes. Gradients are reduced in float32.
    """
    shard_units(policy, layers_of(policy.causal_lm.base_model), mesh, dtype=dtype)
    return policy


def layers_of(trunk: nn.Module) -> Iterable[nn.Module]:
    """List the transformer layers of a model without its output layer."""
    layers = trunk.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def shard_units(
    module: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, *, dtype: torch.dtype
) -> None:
    """Shard each of `layers` as a unit of its own, and the rest of `module` as one more."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for unit in (*layers, module):  # a unit within another is sharded before it
        fully_shard(unit, mesh=mesh, mp_policy=precision)
        sharded = cast("FSDPModule", unit)
        # Losses are already divided by counts over all ranks: sum gradients, do not average them.
        # Forced, because gloo has no scaled sum, not even with a factor of 1.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def freeze(policy: Policy) -> Policy:
    """Make a policy the reference: nothing of it is trained."""
    return policy.eval().requires_grad_(requires_grad=False)


def release(module: nn.Module) -> None:
    """Give gathered parameters back after a forward pass that no backward pass follows.

    Without it the root would stay gathered, and the next optimizer step would change its shards
    only. Nothing for a module that is not sharded.
    """
    if isinstance(module, FSDPModule):
        module.reshard()


@torch.no_grad()
def probe_logprobs(policy: Policy, token_ids: tuple[int, ...]) -> list[float]:
    """Score tokens 1.. of one sequence at temperature 1, nats; every rank must call it."""
    device = next(policy.parameters()).device
    token_ids_BT = torch.tensor([token_ids], device=device)
    positions_N = torch.arange(1, len(token_ids), device=device)
    logprobs: list[float] = policy(token_ids_BT, positions_N, temperature=1.0).logprobs_N.tolist()
    release(policy)
    return logprobs
