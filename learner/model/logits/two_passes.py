"""Log-probs and entropies whose gradient is computed in the backward pass, for any loss of them.

Forward keeps three numbers per token; backward computes the logits of a chunk again.

Shapes: N scored tokens (flat), D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .chunks import Gradients, Inputs, Slopes, chunks
from .softmax import Softmax
from .vocabulary import VocabularyPart


class Scores(Function):
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
            found = chunk.statistics()
            log_sums_N[chunk.rows] = found.log_sums_C
            logprobs_N[chunk.rows] = found.logprobs_C
            entropies_N[chunk.rows] = found.entropies_C
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
            slopes = Slopes(logprob_slopes_N[rows], of_entropies_C)
            chunk.differentiate(log_sums_N[rows], entropies_N[rows], slopes)
            gradients.add(chunk)
        return (*gradients.finish(), None, None, None, None)
