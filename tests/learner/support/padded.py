"""The padded policy: the reference that packing is compared with.

Sequences of a microbatch become rows of one width, the model's own forward pass makes all logits,
and attention is written out, in the model's own precision, with a mask that is right by its looks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from learner.algorithm.microbatch import Sequences
from learner.model.policy import TokenScores

PAD = 0


def attend_by_definition(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to tokens of the same row that are not later and within the window."""
    shared = query.shape[1] // key.shape[1]
    heads = [
        (query[:, h] @ key[:, h // shared].transpose(1, 2) * scaling, value[:, h // shared])
        for h in range(query.shape[1])
    ]
    length = query.shape[2]
    window = length if sliding_window is None else sliding_window
    seen = torch.tensor([[q - window < k <= q for k in range(length)] for q in range(length)])
    outputs = []
    for logits, values in heads:
        capped = logits if softcap is None else softcap * (logits / softcap).tanh()
        outputs.append(capped.masked_fill(~seen, -torch.inf).softmax(-1) @ values)
    return torch.stack(outputs, dim=2), None


AttentionInterface.register("by_definition", attend_by_definition)


class StayWide(TorchFunctionMode):
    """Keeps float64 where transformers casts to float32: in norms and rotary embeddings.

    A gradient that passes a float32 is rounded there, and sums of it differ in the eighth digit.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Leave out such a cast."""
        kwargs = kwargs or {}
        asked = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        narrows = func is Tensor.float or (func is Tensor.to and asked is torch.float32)
        if narrows and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


class PaddedPolicy(nn.Module):
    """Scores what `Policy` scores, by rows of one width."""

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float = 1.0) -> None:
        super().__init__()
        causal_lm.set_attn_implementation("by_definition")
        self.causal_lm = causal_lm
        self.temperature = temperature

    def forward(
        self,
        sequences: Sequences,
        indices_N: Tensor,
        *,
        entropy_gradient: bool = False,
        **_: object,
    ) -> TokenScores:
        """Score the tokens at `indices_N`; see `Policy`. There are no states."""
        rows = sequences.token_ids_T.split(list(sequences.lengths))
        token_ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        logits_BTV = self.causal_lm(input_ids=token_ids_BT, use_cache=False).logits
        row_N = torch.bucketize(indices_N, sequences.bounds[1:], right=True)
        column_N = sequences.positions_T[indices_N]
        log_pi_NV = (logits_BTV[row_N, column_N - 1] / self.temperature).log_softmax(-1)
        targets_N = token_ids_BT[row_N, column_N]
        logprobs_N = log_pi_NV[torch.arange(len(targets_N)), targets_N]
        with torch.set_grad_enabled(entropy_gradient):
            entropies_N = -(log_pi_NV.exp() * log_pi_NV).sum(-1)
        return TokenScores(logprobs_N, entropies_N, log_pi_NV[:, :0])
