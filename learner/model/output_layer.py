"""The output layer: log-probs and entropies of tokens from the hidden states before them.

`logits/` computes them in chunks of tokens, and their gradient in one of two ways:

    two passes    for any loss: the backward pass computes the logits of each chunk again
    one pass      for a loss that is a sum over tokens: its gradient is computed while the logits of
                  a chunk are there, in the forward pass

Logits may be changed before the softmax, as the model's own forward pass does
(`configs/architecture.py`).

Shapes: B episodes, T tokens, N scored tokens (flat), D model width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.architecture import LogitChange
from configs.errors import SettingsError

from .logits.chunks import Inputs, chunks
from .logits.one_pass import LossOfTokens, ScoresWithLoss
from .logits.softmax import Softmax
from .logits.two_passes import Scores
from .logits.vocabulary import ALL_OF_IT, VocabularyPart


class ScoredTokens(NamedTuple):
    """Scores of tokens."""

    logprobs_N: Tensor
    """nats. Shape [N], float32."""
    entropies_N: Tensor
    """nats. Shape [N], float32."""
    loss: Tensor | None = None
    """Of all tokens, where one was given."""


def score_tokens(
    layer: nn.Linear,
    states_ND: Tensor,
    targets_N: Tensor,
    softmax: Softmax,
    *,
    entropy_gradient: bool,
    part: VocabularyPart = ALL_OF_IT,
    loss_of: LossOfTokens | None = None,
) -> ScoredTokens:
    """Score tokens from the hidden states before them.

    Args:
        layer: Hidden states to logits; its weight is whole, as FSDP2 has gathered it.
        states_ND: Shape [N, D].
        targets_N: Token ids. Shape [N], int64.
        softmax: Of the logits.
        entropy_gradient: Let gradients flow through the entropies too.
        part: Tokens whose logits the layer gives.
        loss_of: A loss that is a sum over tokens. Gradients then flow through it alone.
    """
    assert states_ND.shape == (len(targets_N), layer.weight.shape[1])
    arguments = states_ND, layer.weight, layer.bias, targets_N, softmax, part, entropy_gradient
    if loss_of is None:
        return ScoredTokens(*Scores.apply(*arguments))
    loss, logprobs_N, entropies_N = ScoresWithLoss.apply(*arguments, loss_of)
    return ScoredTokens(logprobs_N, entropies_N, loss)


@torch.no_grad()
def draw_tokens(
    layer: nn.Linear,
    states_ND: Tensor,
    numbers_N: Tensor,
    softmax: Softmax,
    *,
    part: VocabularyPart = ALL_OF_IT,
) -> Tensor:
    """Draw a token after each hidden state.

    Args:
        layer: Hidden states to logits.
        states_ND: Shape [N, D].
        numbers_N: Between 0 and 1, for each token; the same one draws the same token again.
        softmax: Of the logits.
        part: Tokens whose logits the layer gives.

    Returns:
        Token ids. Shape [N], int64.
    """
    drawn_N = torch.zeros_like(numbers_N, dtype=torch.int64)
    inputs = Inputs(states_ND, layer.weight, layer.bias, part)
    for chunk in chunks(inputs, drawn_N, softmax):
        drawn_N[chunk.rows] = chunk.draw(numbers_N[chunk.rows])
    return drawn_N


def output_layer(causal_lm: PreTrainedModel) -> nn.Linear:
    """Find the layer from hidden states to logits."""
    return cast("nn.Linear", causal_lm.get_output_embeddings())


def softmax_of(
    causal_lm: PreTrainedModel, *, temperature: float, dtype: torch.dtype | None = None
) -> Softmax:
    """Read how the model gets from the logits of its output layer to a distribution."""
    return Softmax(LogitChange.of(causal_lm.config.to_dict()), temperature, dtype)


def check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Refuse models that get to their logits in an unsupported way: scores would be wrong.

    Raises:
        SettingsError: The model does.
    """
    token_ids_BT = torch.arange(1, 5)[None] % causal_lm.config.vocab_size
    layer = output_layer(causal_lm)
    with torch.no_grad():
        hidden_BTD = causal_lm.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        logits_BTV = functional.linear(hidden_BTD, layer.weight, layer.bias)
        logits_BTV = softmax_of(causal_lm, temperature=1.0).prepare(logits_BTV)
        expected_BTV = causal_lm(input_ids=token_ids_BT, use_cache=False).logits
    if not torch.allclose(logits_BTV, expected_BTV, rtol=1e-4, atol=1e-4):
        raise SettingsError(
            "run.model must change its logits in a supported way (docs/models.md), got "
            f"{type(causal_lm).__name__}, which changes those of its output layer; "
            "choose another model"
        )
