"""Sequence parallelism (Ulysses): the tokens of each microbatch, cut over several ranks.

Every rank computes the layers for a part of the tokens, whatever sequences they are of. Around
attention the ranks exchange tokens for heads: within it each has all tokens for a part of the
heads, so attention is computed as on one rank. The output layer scores each rank's own tokens.

Scores are gathered, and every rank of the group computes the same loss of the whole microbatch. In
the backward pass each follows the scores of its own tokens alone, so that the sum of gradients over
all ranks counts every token once.

Source:
    Jacobs et al. 2023, arXiv:2309.14509.

Shapes: P ranks, T tokens of all sequences, S of these on this rank, N scored tokens, M of these
scored here, H heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithm.microbatch import Sequences


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share microbatches with this one."""

    rank: int = 0
    """This rank's place in the group."""
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None where the group has one rank."""


ALONE = SequenceGroup()


class SequenceSplit:
    """The tokens of one microbatch over the ranks of a group: consecutive parts, without padding.

    Their lengths differ by one token at most. Fewer tokens than ranks are not cut: every rank runs
    all of them, and the first one scores them.
    """

    def __init__(self, group: SequenceGroup, sequences: Sequences, indices_N: Tensor) -> None:
        """Cut the tokens of a microbatch.

        Args:
            group: Ranks that share the microbatch; with one rank nothing is cut.
            sequences: Sequences of the microbatch.
            indices_N: Scored tokens, among the T. Shape [N], int64.
        """
        self._group = group
        num_tokens = len(sequences.token_ids_T)
        states_N = sequences.before_T.index_select(0, indices_N)
        # Fewer tokens than ranks stay together: all ranks run them, and the first scores them.
        self._parts = group.size if num_tokens >= group.size else 1
        bounds = [num_tokens * part // self._parts for part in range(self._parts + 1)]
        self._lengths = [end - begin for begin, end in pairwise(bounds)]
        part = group.rank % self._parts
        self._begin, self._end = bounds[part : part + 2]
        self.states_M = states_N
        """Place of the state of each token that is scored here, among this rank's. Shape [M]."""
        if group.size > 1:
            inner = torch.tensor(bounds[1:-1], device=states_N.device)
            owners_N = torch.bucketize(states_N, inner, right=True)
            # Tokens of the first rank, of the second one, ...
            self._order_N = owners_N.argsort(stable=True)
            # On a GPU, the one place of a forward pass where the CPU waits for the card.
            self._counts: list[int] = owners_N.bincount(minlength=group.size).tolist()
            self.states_M = self.own_scores(states_N) - self._begin

    def own(self, values_T: Tensor) -> Tensor:
        """Take this rank's part of the tokens. Shape [S]."""
        return values_T[self._begin : self._end]

    def own_scores(self, values_N: Tensor) -> Tensor:
        """Take the scored tokens whose states this rank has. Shape [M]."""
        return values_N if self._group.size == 1 else values_N[self.places(slice(None))]

    def places(self, rows: slice) -> Tensor | slice:
        """Return the places among the N of `rows` of this rank's M tokens; a slice on one rank."""
        if self._group.size == 1:
            return rows
        places_M: Tensor = self._order_N.split(self._counts)[self._group.rank][rows]
        return places_M

    def gather(self, values_M: Tensor) -> Tensor:
        """Put together the values of all scored tokens.

        Their gradients, alike on all ranks, go to the rank that gave them.

        Returns:
            Shape [N, ...].
        """
        if self._group.size == 1:
            return values_M
        gathered: Tensor = _Gather.apply(values_M, self._counts, self._group)
        return gathered[self._order_N.argsort()]

    def by_heads(self, x_1HSK: Tensor) -> Tensor:
        """Exchange all heads of this rank's tokens for all tokens of its heads.

        Where there are fewer heads than ranks, as of keys and values, several ranks have the same.

        Returns:
            Shape [1, H / P, T, K], or [1, 1, T, K].
        """
        parts = self._parts
        if parts == 1:
            return x_1HSK
        x_HSK = x_1HSK[0]
        if len(x_HSK) < parts:
            x_HSK = x_HSK.repeat_interleave(parts // len(x_HSK), dim=0)
        rows = x_HSK.unflatten(0, (parts, -1)).transpose(1, 2).flatten(0, 1)
        sent = [self._end - self._begin] * parts
        return _exchange(rows, sent, self._lengths, self._group).transpose(0, 1)[None]

    def by_tokens(self, x_1THK: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads for all heads of its tokens.

        Returns:
            Shape [1, S, H, K].
        """
        parts, length = self._parts, self._end - self._begin
        if parts == 1:
            return x_1THK
        rows: Tensor = _exchange(x_1THK[0], self._lengths, [length] * parts, self._group)
        return rows.view(parts, length, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)[None]


def _exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: SequenceGroup
) -> Tensor:
    """Send each rank its rows; the gradients come back the same way."""
    exchanged: Tensor = _Exchange.apply(rows, sent, received, group)
    return exchanged


def _all_to_all(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: SequenceGroup
) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group.group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: SequenceGroup
    ) -> Tensor:
        ctx.how = received, sent, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        return _all_to_all(gradient, *ctx.how), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, counts: Sequence[int], group: SequenceGroup) -> Tensor:
        ctx.counts, ctx.rank = counts, group.rank
        copies = torch.cat([values_M] * group.size)
        return _all_to_all(copies, [len(values_M)] * group.size, counts, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_N,) = grad_outputs
        return gradient_N.split(list(ctx.counts))[ctx.rank], None, None
