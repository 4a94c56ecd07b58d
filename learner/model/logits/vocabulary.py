"""A part of the vocabulary on each of several ranks: none of them has all logits of a token.

Each computes maximum, sums and the chosen logit over its part; from those of all parts every rank
gets the same log-probs and entropies. Gradients of the weight stay where they are, those of the
hidden states are added up.

Shapes: C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Consecutive tokens of the vocabulary, whose logits this rank computes."""

    first: int = 0
    group: dist.ProcessGroup | None = None
    """The ranks that have the others; None = there are none."""

    def places(self, targets_C: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
        """Find tokens among this rank's; whether they are there, None = all of them are."""
        if self.group is None:
            return targets_C, None
        places_C = targets_C - self.first
        is_here_C = (places_C >= 0) & (places_C < size)
        return torch.where(is_here_C, places_C, 0), is_here_C

    def merge(self, found_4C: Tensor, is_here_C: Tensor | None) -> Tensor:
        """Merge the parts of all ranks.

        Args:
            found_4C: Largest logit; from it, the chosen logit, the sum of the powers, and that of
                their products with the logits. Shape [4, C].
            is_here_C: Whether the chosen one is of this rank's part. Shape [C].

        Returns:
            The same of the whole vocabulary. Shape [4, C].
        """
        if self.group is None:
            return found_4C
        assert is_here_C is not None
        own_C, chosen_C, sums_C, products_C = found_4C
        tops_C = own_C.clone()
        dist.all_reduce(tops_C, op=dist.ReduceOp.MAX, group=self.group)
        lower_C = own_C - tops_C
        factors_C = lower_C.exp()
        chosen_C = torch.where(is_here_C, chosen_C + lower_C, 0)
        products_C = factors_C * (products_C + sums_C * lower_C)
        sums_3C = torch.stack([chosen_C, factors_C * sums_C, products_C])
        dist.all_reduce(sums_3C, group=self.group)
        return torch.cat([tops_C[None], sums_3C])

    def before(self, shares_C: Tensor) -> Tensor:
        """Add up the shares of all earlier parts, given this one's. Shape [C]."""
        if self.group is None:
            return torch.zeros_like(shares_C)
        rank = dist.get_rank(self.group)
        shares_PC = shares_C.new_zeros(dist.get_world_size(self.group), len(shares_C))
        shares_PC[rank] = shares_C
        dist.all_reduce(shares_PC, group=self.group)
        return shares_PC[:rank].sum(0)

    def count(self, tokens_C: Tensor, size: int) -> Tensor:
        """Add up numbers of tokens of all parts, of which this has `size`; the last one at most."""
        last = torch.full_like(tokens_C[:1], size)
        counts = torch.cat([tokens_C, last])
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        return torch.minimum(counts[:-1], counts[-1] - 1)  # shares add up to 1, nearly

    def add(self, of_states_ND: Tensor) -> None:
        """Add up the ranks' gradients of the hidden states, in place."""
        if self.group is not None:
            dist.all_reduce(of_states_ND, group=self.group)


ALL_OF_IT = VocabularyPart()
