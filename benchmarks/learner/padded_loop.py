"""Loops to compare with: padded rows of plain transformers, with full or with chunked logits.

`plain` is the loop that one would write first: eight rows in the order of arrival, and all logits
that the model returns, those of prompts and pads too. `before` is this project's step at 5cf2266:
rows of similar length cut by padded tokens, an output layer for the trained tokens alone, in chunks
of 2**24 logits that `torch.utils.checkpoint` computes again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from buffer.record.episode import Episode
from learner.model.output_layer import output_layer

ROWS = 8
CHUNK_LOGITS = 2**24
CLIP = 0.2

Scores = tuple[Tensor, Tensor]


def arrival_order(lengths: Sequence[int], _budget: int) -> list[list[int]]:
    """Cut eight rows after eight rows."""
    rows = list(range(len(lengths)))
    return [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]


def similar_lengths(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut rows in ascending length, greedily, by padded tokens."""
    cuts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if cuts and (len(cuts[-1]) + 1) * lengths[row] <= budget:
            cuts[-1].append(row)
        else:
            cuts.append([row])
    return cuts


def score(weight_VD: Tensor, states_ND: Tensor, targets_N: Tensor) -> Scores:
    """Log-probs and entropies from all logits at once."""
    return scores_of(functional.linear(states_ND, weight_VD), targets_N)


def scores_of(logits_NV: Tensor, targets_N: Tensor) -> Scores:
    """Log-probs and entropies from logits."""
    log_pi_NV = logits_NV.log_softmax(-1)
    with torch.no_grad():
        entropies_N = -(log_pi_NV.exp() * log_pi_NV).sum(-1)
    return -functional.nll_loss(log_pi_NV, targets_N, reduction="none"), entropies_N


def score_in_chunks(weight_VD: Tensor, states_ND: Tensor, targets_N: Tensor) -> Scores:
    """The same, with logits of one chunk after the other, computed again in the backward pass."""
    size = max(1, CHUNK_LOGITS // len(weight_VD))
    chunks = [
        checkpoint(score, weight_VD, states, targets, use_reentrant=False)
        for states, targets in zip(states_ND.split(size), targets_N.split(size), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class PaddedLoop:
    """AdamW on padded microbatches."""

    def __init__(self, causal_lm: PreTrainedModel, *, is_plain: bool, budget: int) -> None:
        self._causal_lm = causal_lm
        self._cut = arrival_order if is_plain else similar_lengths
        self._score = self._score_all if is_plain else self._score_trained
        self._budget = budget
        self._adam = torch.optim.AdamW(causal_lm.parameters(), lr=1e-6, fused=True)

    def step(self, episodes: Sequence[Episode], advantages: Sequence[float]) -> int:
        """Train one batch; the tokens that were run, pads included."""
        lengths = [len(e.prompt_ids) + len(e.completion.token_ids) for e in episodes]
        trained = sum(len(e.completion.token_ids) for e in episodes)
        num_tokens = 0
        for rows in self._cut(lengths, self._budget):
            width = max(lengths[row] for row in rows)
            num_tokens += width * len(rows)
            loss = self._loss([episodes[row] for row in rows], [advantages[r] for r in rows], width)
            (loss / trained).backward()
        torch.nn.utils.clip_grad_norm_(self._causal_lm.parameters(), 1.0)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return num_tokens

    def _loss(self, episodes: list[Episode], advantages: list[float], width: int) -> Tensor:
        token_ids_BT = np.zeros((len(episodes), width), dtype=np.int64)
        trained_BT = np.zeros((len(episodes), width), dtype=bool)
        for b, episode in enumerate(episodes):
            first, last = (
                len(episode.prompt_ids),
                len(episode.prompt_ids) + len(episode.completion.token_ids),
            )
            token_ids_BT[b, :first] = episode.prompt_ids
            token_ids_BT[b, first:last] = episode.completion.token_ids
            trained_BT[b, first:last] = True
        ids_BT = torch.from_numpy(token_ids_BT)
        places_N = torch.from_numpy(np.flatnonzero(trained_BT))
        logprobs_N = self._score(ids_BT, places_N)
        mu = np.concatenate([e.completion.behaviour_logprobs for e in episodes])
        repeats = [len(e.completion.token_ids) for e in episodes]
        advantages_N = torch.from_numpy(np.repeat(np.array(advantages, dtype=np.float32), repeats))
        ratios_N = (logprobs_N - torch.from_numpy(mu)).exp()
        clipped_N = ratios_N.clamp(1 - CLIP, 1 + CLIP)
        return -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N).sum()

    def _score_all(self, ids_BT: Tensor, places_N: Tensor) -> Tensor:
        logits_BTV = self._causal_lm(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        logprobs_N, _ = scores_of(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())
        logprobs_BT = functional.pad(logprobs_N.view(len(ids_BT), -1), (1, 0))
        return logprobs_BT.flatten()[places_N]

    def _score_trained(self, ids_BT: Tensor, places_N: Tensor) -> Tensor:
        hidden_BTD = self._causal_lm.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        weight_VD = output_layer(self._causal_lm).weight
        states_ND = hidden_BTD.flatten(0, 1)[places_N - 1]
        return score_in_chunks(weight_VD, states_ND, ids_BT.flatten()[places_N])[0]
