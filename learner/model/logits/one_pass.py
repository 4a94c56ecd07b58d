"""The gradient of a loss that is a sum over tokens, computed in the forward pass.

A token's log-prob and entropy are all that its part of such a loss depends on. So its derivative by
the logits of a chunk is computed while they are there, and no logits are computed again.

Shapes: N scored tokens (flat), C tokens of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .chunks import Gradients, Inputs, Slopes, Statistics, chunks
from .softmax import Softmax
from .vocabulary import VocabularyPart

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
            found = chunk.statistics()
            logprobs_N[chunk.rows] = found.logprobs_C
            entropies_N[chunk.rows] = found.entropies_C
            loss, slopes = _differentiate(
                loss_of, chunk.rows, found, entropy_gradient=entropy_gradient
            )
            losses.append(loss)
            chunk.differentiate(found.log_sums_C, found.entropies_C, slopes)
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
) -> tuple[Tensor, Slopes]:
    """Compute a chunk's part of the loss, and its derivatives."""
    logprobs_C = at.logprobs_C.detach().requires_grad_()
    entropies_C = at.entropies_C.detach().requires_grad_(entropy_gradient)
    by = [logprobs_C, entropies_C] if entropy_gradient else [logprobs_C]
    with torch.enable_grad():
        loss = loss_of(rows, logprobs_C, entropies_C)
        of_logprobs_C, *of_entropies_C = torch.autograd.grad(loss, by)
    return loss.detach(), Slopes(of_logprobs_C, of_entropies_C[0] if entropy_gradient else None)
