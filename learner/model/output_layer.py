"""The output layer in chunks: log-probs and entropies of tokens from hidden states.

Its logits may be changed before the softmax, as the model's own forward pass does
(`configs/architecture.py`).

A chunk's logits are recomputed in the backward pass, so that an [N, V] tensor of logits never
exists for a large V.

Shapes: B episodes, T tokens, N scored tokens (flat), D model width, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from configs.architecture import LogitChange
from configs.errors import SettingsError

# Logits held at a time: 64 MiB in float32. Small vocabularies fit in one chunk and pay no
# recomputation.
CHUNK_LOGITS = 2**24


def score_tokens(
    layer: nn.Module,
    states_ND: Tensor,
    targets_N: Tensor,
    *,
    change: LogitChange,
    temperature: float,
    entropy_gradient: bool,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Score tokens from the hidden states before them.

    Args:
        layer: Hidden states to logits.
        states_ND: Shape [N, D].
        targets_N: Token ids. Shape [N], int64.
        change: Of the logits, before anything else.
        temperature: Divides the logits.
        entropy_gradient: Let gradients flow through the entropies too.
        chunk_tokens: Most tokens whose logits exist at a time.

    Returns:
        Log-probs and entropies, nats. Shapes [N], float32.
    """
    score = partial(
        _score_chunk,
        layer,
        change=change,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )
    if len(targets_N) <= chunk_tokens:
        return score(states_ND, targets_N)
    chunks = [
        checkpoint(score, states, targets, use_reentrant=False)
        for states, targets in zip(
            states_ND.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True
        )
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score_chunk(
    layer: nn.Module,
    states_ND: Tensor,
    targets_N: Tensor,
    *,
    change: LogitChange,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits_NV = layer(states_ND)
    # bfloat16 has too few digits for a log-prob; float64 keeps its own.
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logits_NV = change.apply(logits_NV) / temperature
    log_pi_NV = logits_NV.log_softmax(-1)
    logprobs_N = -functional.nll_loss(log_pi_NV, targets_N, reduction="none")
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies_N = -(log_pi_NV.exp() * log_pi_NV).sum(-1)
    return logprobs_N, entropies_N


def output_layer(causal_lm: PreTrainedModel) -> nn.Module:
    """Find the layer from hidden states to logits."""
    layer = causal_lm.get_output_embeddings()
    assert isinstance(layer, nn.Module)  # a causal language model has one
    return layer


def logit_change(causal_lm: PreTrainedModel) -> LogitChange:
    """Read how the model changes the logits of its output layer."""
    return LogitChange.of(causal_lm.config.to_dict())


def check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Refuse models that change logits in an unsupported way: chunked scores would be wrong.

    Raises:
        SettingsError: The model does.
    """
    token_ids_BT = torch.arange(1, 5)[None] % causal_lm.config.vocab_size
    with torch.no_grad():
        hidden_BTD = causal_lm.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        logits_BTV = logit_change(causal_lm).apply(output_layer(causal_lm)(hidden_BTD))
        expected_BTV = causal_lm(input_ids=token_ids_BT, use_cache=False).logits
    if not torch.allclose(logits_BTV, expected_BTV, rtol=1e-4, atol=1e-4):
        raise SettingsError(
            "run.model must change its logits in a supported way (docs/models.md), got "
            f"{type(causal_lm).__name__}, which changes those of its output layer; "
            "choose another model"
        )
