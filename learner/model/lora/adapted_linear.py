"""A linear layer whose weight is frozen and changed by a low-rank adapter (LoRA).

Formula: `y = W x + b + scale * B (A x)`; only A and B are trained. B is 0 at first, so the layer
computes what it did before.

Source: Hu et al. 2021, arXiv:2106.09685.

Shapes: N outputs, M inputs, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from broker.weights.low_rank import BLOCK, add_low_rank
from learner.weights.wire.gather import whole_of

BLOCK_ON_CARD = 2**26
"""Of the merge on a GPU, where each operation has to be large."""


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter; its own tensors keep their names."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = scale
        self.weight = linear.weight
        self.bias = linear.bias
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., M] to outputs [..., N]."""
        outputs = functional.linear(inputs, self.weight, self.bias)
        low = functional.linear(functional.linear(inputs, self.lora_a), self.lora_b)
        return torch.add(outputs, low, alpha=self.scale)

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the weight with the adapter in a dtype; sharded as the weight is. Collective.

        Each rank merges its own rows: these of B are on the rank that has these of the weight.
        """
        weight = self.weight.detach()
        if not isinstance(weight, DTensor):
            return self._merge(weight, self.lora_b.detach(), self.lora_a.detach()).to(dtype)
        a_RM = whole_of(self.lora_a.detach(), self.lora_a.dtype)
        rows, b_NR = (_on_card(part).to_local() for part in (weight, self.lora_b.detach()))
        return DTensor.from_local(
            self._merge(rows, b_NR, a_RM.to(rows.device)).to(dtype),
            weight.device_mesh,
            weight.placements,
            shape=weight.shape,
            stride=weight.stride(),
        )

    def _merge(self, weight_NM: Tensor, b_NR: Tensor, a_RM: Tensor) -> Tensor:
        merged_NM = weight_NM.clone()
        block = BLOCK_ON_CARD if merged_NM.is_cuda else BLOCK
        add_low_rank(merged_NM, b_NR, a_RM, scale=self.scale, block=block)
        return merged_NM


def _on_card(tensor: Tensor) -> DTensor:
    """Move an offloaded tensor to where it is gathered."""
    assert isinstance(tensor, DTensor)
    moved = tensor.to(device=tensor.device_mesh.device_type)
    assert isinstance(moved, DTensor)
    return moved
