"""The output layer: log-probs and entropies of tokens from the hidden states before them.

The logits of a chunk of tokens lie in one buffer that the next chunk overwrites, so an [N, V]
tensor never exists. Forward keeps three numbers per token; backward computes the logits of a chunk
again, puts their gradient in their place, and adds it up for the states and the weight. All between
those products goes block by block, a few tokens at a time, so that it stays in a core's caches.

Logits may be changed before the softmax, as the model's own forward pass does
(`configs/architecture.py`).

Shapes: B episodes, T tokens, N scored tokens (flat), C tokens of a chunk, R of a block, D model
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from configs.architecture import LogitChange
from configs.errors import SettingsError

from .memory_rules import CHUNK_SIZES

BLOCKS_PER_CHUNK = 8


@dataclass(frozen=True, slots=True)
class Softmax:
    """The way from the layer's logits to the distribution that a token was drawn from."""

    change: LogitChange
    """Of the logits, before anything else."""
    temperature: float
    """Divides the logits."""

    def prepare(self, logits: Tensor) -> Tensor:
        """Change logits of any shape, in place."""
        if self.change.factor != 1.0:
            logits.mul_(self.change.factor)
        if self.change.cap is not None:
            logits.div_(self.change.cap).tanh_().mul_(self.change.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, prepared: Tensor) -> Tensor | float:
        """Differentiate `prepare`, given its result."""
        slope = self.change.factor / self.temperature
        if self.change.cap is None:
            return slope
        tanh = prepared * (self.temperature / self.change.cap)
        return tanh.square_().neg_().add_(1).mul_(slope)


def score_tokens(
    layer: nn.Linear,
    states_ND: Tensor,
    targets_N: Tensor,
    softmax: Softmax,
    *,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Score tokens from the hidden states before them.

    Args:
        layer: Hidden states to logits; its weight is whole, as FSDP2 has gathered it.
        states_ND: Shape [N, D].
        targets_N: Token ids. Shape [N], int64.
        softmax: Of the logits.
        entropy_gradient: Let gradients flow through the entropies too.

    Returns:
        Log-probs and entropies, nats. Shapes [N], float32.
    """
    assert states_ND.shape == (len(targets_N), layer.weight.shape[1])
    scores: tuple[Tensor, Tensor] = _Scores.apply(
        states_ND, layer.weight, layer.bias, targets_N, softmax, entropy_gradient
    )
    return scores


class _Scores(Function):
    """Log-probs and entropies as a function of states, weight and bias."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes all by position
        ctx: Any,
        states_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        softmax: Softmax,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        chunks = _Chunks(states_ND, weight_VD, bias_V, softmax)
        # No views of one tensor: FSDP2 attaches hooks to outputs.
        log_sums_N, logprobs_N, entropies_N = (
            states_ND.new_empty(len(targets_N), dtype=chunks.wide) for _ in range(3)
        )
        for rows, logits_RV in chunks.blocks():
            # Each is a maximum or a sum over the vocabulary, or one element of it.
            tops_R = logits_RV.amax(-1)
            logits_RV.sub_(tops_R[:, None])
            powers_RV = logits_RV.exp()
            sums_R = powers_RV.sum(-1)
            products_R = torch.einsum("rv,rv->r", powers_RV, logits_RV)
            chosen_R = logits_RV.gather(1, targets_N[rows, None])[:, 0]

            logs_R = sums_R.log()
            log_sums_N[rows] = tops_R + logs_R
            logprobs_N[rows] = chosen_R - logs_R
            entropies_N[rows] = logs_R - products_R / sums_R
        ctx.softmax, ctx.entropy_gradient = softmax, entropy_gradient
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
        chunks = _Chunks(states_ND, weight_VD, bias_V, ctx.softmax, ctx.needs_input_grad)
        for rows, logits_RV in chunks.blocks():
            slope = ctx.softmax.slope(logits_RV)
            slopes_R1 = logprob_slopes_N[rows, None]
            log_pi_RV = logits_RV.sub_(log_sums_N[rows, None])
            gradient_RV = log_pi_RV.exp()
            if ctx.entropy_gradient:  # of the entropy H: -pi (log pi + H)
                log_pi_RV.add_(entropies_N[rows, None]).mul_(entropy_slopes_N[rows, None])
                gradient_RV.mul_(log_pi_RV.add_(slopes_R1).neg_())
            else:
                gradient_RV.mul_(-slopes_R1)
            gradient_RV.scatter_add_(1, targets_N[rows, None], slopes_R1)
            logits_RV.copy_(gradient_RV.mul_(slope))
        return (*chunks.gradients, None, None, None)


class _Chunks:
    """The logits of one chunk of tokens after the other, each in the place of the one before."""

    def __init__(
        self,
        states_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        softmax: Softmax,
        needs_gradients: tuple[bool, ...] = (False, False, False),
    ) -> None:
        self._inputs = states_ND, weight_VD, bias_V
        self._softmax = softmax
        self.gradients = tuple(
            torch.zeros_like(each) if each is not None and needed else None
            for each, needed in zip(self._inputs, needs_gradients, strict=False)
        )
        """Of states, weight and bias, once all blocks have their gradient in their place."""
        # bfloat16, in which the layer computes, has too few digits for a log-prob.
        self.wide = torch.promote_types(weight_VD.dtype, torch.float32)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits of each block, ready for the softmax, in a place of their own.

        What the caller leaves there is taken for their gradient, if gradients are needed.
        """
        states_ND, weight_VD, bias_V = self._inputs
        least = CHUNK_SIZES[states_ND.device.type]
        size = max(1, min(len(states_ND), max(least.tokens, least.logits // len(weight_VD))))
        logits_CV = weight_VD.new_empty(size, len(weight_VD))
        for start in range(0, len(states_ND), size):
            states_CD = states_ND[start : start + size]
            logits_CV = logits_CV[: len(states_CD)]
            torch.mm(states_CD, weight_VD.T, out=logits_CV)
            if bias_V is not None:
                logits_CV.add_(bias_V)
            first = start
            for narrow_RV in logits_CV.split(-(-size // BLOCKS_PER_CHUNK)):
                logits_RV = self._softmax.prepare(narrow_RV.to(self.wide))
                yield slice(first, first + len(logits_RV)), logits_RV
                first += len(logits_RV)
                if logits_RV is not narrow_RV:
                    narrow_RV.copy_(logits_RV)
            self._add(slice(start, start + len(states_CD)), logits_CV)

    def _add(self, rows: slice, gradient_CV: Tensor) -> None:
        """Add the gradient of a chunk's logits to those of what they were computed from."""
        states_ND, weight_VD, _ = self._inputs
        of_states_ND, of_weight_VD, of_bias_V = self.gradients
        if of_states_ND is not None:
            torch.mm(gradient_CV, weight_VD, out=of_states_ND[rows])
        if of_weight_VD is not None:
            of_weight_VD.addmm_(gradient_CV.T, states_ND[rows])
        if of_bias_V is not None:
            of_bias_V.add_(gradient_CV.sum(0))


def output_layer(causal_lm: PreTrainedModel) -> nn.Linear:
    """Find the layer from hidden states to logits."""
    return cast("nn.Linear", causal_lm.get_output_embeddings())


def softmax_of(causal_lm: PreTrainedModel, *, temperature: float) -> Softmax:
    """Read how the model gets from the logits of its output layer to a distribution."""
    return Softmax(LogitChange.of(causal_lm.config.to_dict()), temperature)


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
