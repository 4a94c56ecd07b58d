"""The output layer: log-probs and entropies of tokens from the hidden states before them.

`logits.py` computes them in chunks of tokens, and their gradient in one of two ways:

    two passes    for any loss: the backward pass computes the logits of each chunk again
    one pass      for a loss that is a sum over tokens: its gradient is computed while the logits of
                  a chunk are there, in the forward pass

Logits may be changed before the softmax, as the model's own forward pass does
(`configs/architecture.py`).

Shapes: B episodes, T tokens, N scored tokens (flat), D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from configs.architecture import LogitChange
from configs.errors import SettingsError

from .logits import (
    ALL_OF_IT,
    Gradients,
    Inputs,
    LossDerivatives,
    Softmax,
    Statistics,
    VocabularyPart,
    chunks,
)

# --------------------------------------------------------------------------------------------------
# The gradient of a loss that is a sum over tokens, computed in the forward pass.
#
# A token's part of such a loss depends on its log-prob and entropy alone. So the derivative by the
# logits of a chunk is computed while they are there, and no logits are computed again.
#
# Shapes: N scored tokens (flat), C tokens of a chunk, D model width, V vocabulary.

LossOfTokens = Callable[[slice, Tensor, Tensor], Tensor]
"""Some of the N tokens, their log-probs and entropies -> their part of the loss."""


class ScoresWithLoss(Function):
    """A loss as a function of states, weight and bias; log-probs and entropies beside it."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes all by position
        ctx: Any,
        states_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        softmax: Softmax,
        part: VocabularyPart,
        entropy_gradient: bool,
        loss_of: LossOfTokens,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        logprobs_N, entropies_N = (
            states_ND.new_empty(len(targets_N), dtype=wide) for _ in range(2)
        )
        inputs = Inputs(states_ND, weight_VD, bias_V, part)
        gradients = Gradients(inputs, ctx.needs_input_grad)
        losses = []
        for chunk in chunks(inputs, targets_N, softmax):
            statistics = chunk.statistics()
            logprobs_N[chunk.rows] = statistics.logprobs_C
            entropies_N[chunk.rows] = statistics.entropies_C
            loss, slopes = _differentiate(
                loss_of, chunk.rows, statistics, entropy_gradient=entropy_gradient
            )
            losses.append(loss)
            chunk.differentiate(statistics.log_sums_C, statistics.entropies_C, slopes)
            gradients.add(chunk)
        ctx.gradients = gradients.finish()
        ctx.mark_non_differentiable(logprobs_N, entropies_N)
        total = torch.stack(losses).sum() if losses else logprobs_N.new_zeros(())
        return total, logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Any, ...]:
        factor, gradients = grad_outputs[0], ctx.gradients
        ctx.gradients = None  # so that autograd takes them as they are, without a copy
        # On a CPU a pass over the weight's gradient takes a while; to ask a GPU, it would wait.
        if factor.is_cuda or factor != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return (*gradients, None, None, None, None, None)


def _differentiate(
    loss_of: LossOfTokens, rows: slice, at: Statistics, *, entropy_gradient: bool
) -> tuple[Tensor, LossDerivatives]:
    """Compute a chunk's part of the loss, and its derivatives."""
    logprobs_C = at.logprobs_C.detach().requires_grad_()
    entropies_C = at.entropies_C.detach().requires_grad_(entropy_gradient)
    by = [logprobs_C, entropies_C] if entropy_gradient else [logprobs_C]
    with torch.enable_grad():
        loss = loss_of(rows, logprobs_C, entropies_C)
        of_logprobs_C, *of_entropies_C = torch.autograd.grad(loss, by)
    return loss.detach(), LossDerivatives(
        of_logprobs_C, of_entropies_C[0] if entropy_gradient else None
    )


# --------------------------------------------------------------------------------------------------
# Log-probs and entropies whose gradient is computed in the backward pass, for any loss of them.
#
# Forward keeps three numbers per token; backward computes the logits of a chunk again.
#
# Shapes: N scored tokens (flat), D model width, V vocabulary.


class ScoresWithoutLoss(Function):
    """Log-probs and entropies as a function of states, weight and bias."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes all by position
        ctx: Any,
        states_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        softmax: Softmax,
        part: VocabularyPart,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        # No views of one tensor: FSDP2 attaches hooks to outputs.
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        log_sums_N, logprobs_N, entropies_N = (
            states_ND.new_empty(len(targets_N), dtype=wide) for _ in range(3)
        )
        for chunk in chunks(Inputs(states_ND, weight_VD, bias_V, part), targets_N, softmax):
            statistics = chunk.statistics()
            log_sums_N[chunk.rows] = statistics.log_sums_C
            logprobs_N[chunk.rows] = statistics.logprobs_C
            entropies_N[chunk.rows] = statistics.entropies_C
        ctx.softmax, ctx.part, ctx.entropy_gradient = softmax, part, entropy_gradient
        ctx.save_for_backward(states_ND, weight_VD, bias_V, targets_N, log_sums_N, entropies_N)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Any, ...]:
        logprob_slopes_N, entropy_slopes_N = grad_outputs
        states_ND, weight_VD, bias_V, targets_N, log_sums_N, entropies_N = ctx.saved_tensors
        inputs = Inputs(states_ND, weight_VD, bias_V, ctx.part)
        gradients = Gradients(inputs, ctx.needs_input_grad)
        for chunk in chunks(inputs, targets_N, ctx.softmax):
            rows = chunk.rows
            of_entropies_C = entropy_slopes_N[rows] if ctx.entropy_gradient else None
            slopes = LossDerivatives(logprob_slopes_N[rows], of_entropies_C)
            chunk.differentiate(log_sums_N[rows], entropies_N[rows], slopes)
            gradients.add(chunk)
        return (*gradients.finish(), None, None, None, None)


# --------------------------------------------------------------------------------------------------
# The output layer: log-probs and entropies of tokens from the hidden states before them.


class ScoredTokens(NamedTuple):
    """Log-probs and entropies of tokens, and their loss."""

    logprobs_N: Tensor
    """nats. Shape [N], float32."""
    entropies_N: Tensor
    """nats. Shape [N], float32."""
    loss: Tensor | None = None
    """Loss of all tokens; None where no loss was passed."""


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
        softmax: Softmax of the logits.
        entropy_gradient: Let gradients flow through the entropies too.
        part: Tokens whose logits the layer gives.
        loss_of: A loss that is a sum over tokens. Gradients then flow through it alone.
    """
    assert states_ND.shape == (len(targets_N), layer.weight.shape[1])
    arguments = states_ND, layer.weight, layer.bias, targets_N, softmax, part, entropy_gradient
    if loss_of is None:
        return ScoredTokens(*ScoresWithoutLoss.apply(*arguments))
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
        numbers_N: A number between 0 and 1 for each token; the same one draws the same token.
        softmax: Softmax of the logits.
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
    return Softmax(LogitChange.from_config(causal_lm.config.to_dict()), temperature, dtype)


def check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Refuse models that get to their logits in an unsupported way: scores would be wrong.

    The model, whose weights must be in memory, computes four tokens to be compared.

    Raises:
        SettingsError: The model's logits differ from those computed here.
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
            f"{type(causal_lm).__name__}, whose logits differ from those that its config.json "
            "gives; choose another model"
        )
