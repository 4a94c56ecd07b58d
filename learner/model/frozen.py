"""Frozen weights in fewer bits than passes compute with, widened for each product.

A weight in 4 bits ("nf4", NormalFloat: Dettmers et al. 2023, arXiv:2305.14314) is

    weight = bfloat16(scale of its block * level of its code)

with 64 elements of a row in a block, and the largest magnitude of them as its scale. The 16 levels
lie as the quantiles of a normal distribution do. Scales and levels are of bfloat16, so that each
product is rounded once: CPU and card, one rank and several, learner and export get the same bits,
and actors are sent these bits. Blocks lie within rows, so any number of ranks can share the rows.

Shapes: N outputs, M inputs, K elements of a block.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .memory_rules import FOUR_BIT_BLOCK as BLOCK

OUTERMOST = 0.9677083
"""Quantile of the largest level: the mean of 1 - 1/30 and 1 - 1/32, for 15 and 16 levels."""


@cache
def levels() -> Tensor:
    """List the 16 values of codes, ascending, with -1, 0 and 1 among them. Shape [16], bfloat16."""
    above, below = (
        torch.special.ndtri(torch.linspace(OUTERMOST, 0.5, number + 1, dtype=torch.float64))
        for number in (8, 7)
    )
    return torch.cat([-below / below[0] + 0.0, (above / above[0])[:-1].flip(0)]).bfloat16()


@cache
def _pairs(device: torch.device) -> Tensor:
    """List the two values of each byte as the bits of one number. Shape [256], int32."""
    high, low = torch.meshgrid(levels(), levels(), indexing="ij")
    return torch.stack([high, low], dim=-1).reshape(256, 2).view(torch.int32).flatten().to(device)


def pack(weight_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, two in a byte, and scales of a matrix. Shapes [N, M / 2] and [N, M / K]."""
    blocks_NBK = weight_NM.float().unflatten(1, (-1, BLOCK))
    scales_NB = blocks_NBK.abs().amax(-1).bfloat16()
    tiny = torch.finfo(torch.float32).tiny
    ratios_NBK = blocks_NBK / scales_NB.float().clamp(min=tiny)[..., None]
    values = levels().float().to(weight_NM.device)
    codes_NBK = torch.bucketize(ratios_NBK, (values[1:] + values[:-1]) / 2, out_int32=True)
    codes_NM = codes_NBK.flatten(1).to(torch.uint8)
    return codes_NM[:, ::2] * 16 + codes_NM[:, 1::2], scales_NB


def unpack(codes_NH: Tensor, scales_NB: Tensor) -> Tensor:
    """Return the matrix that codes and scales stand for. Shape [N, M], bfloat16."""
    pairs = _pairs(codes_NH.device).index_select(0, codes_NH.int().flatten())
    values_NM = pairs.view(codes_NH.shape).view(torch.bfloat16)
    values_NM.unflatten(1, (-1, BLOCK)).mul_(scales_NB[..., None])
    return values_NM


def widen(weight_NM: Tensor, scales_NB: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a stored weight in another dtype; packed weights have scales."""
    if scales_NB is not None:
        weight_NM = unpack(weight_NM, scales_NB.to(torch.bfloat16))
    return weight_NM.to(dtype)


class FrozenProduct(Function):
    """`x W^T + b` by a weight that is widened for it, and again for the gradient of `x`."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight_NM: Tensor, scales_NB: Tensor | None, bias_N: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(weight_NM, scales_NB)
        bias_N = None if bias_N is None else bias_N.to(inputs.dtype)
        return functional.linear(inputs, widen(weight_NM, scales_NB, inputs.dtype), bias_N)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (slopes,), (weight_NM, scales_NB) = grad_outputs, ctx.saved_tensors
        return slopes @ widen(weight_NM, scales_NB, slopes.dtype), None, None, None


def frozen_product(
    inputs: Tensor, weight_NM: Tensor, scales_NB: Tensor | None, bias_N: Tensor | None
) -> Tensor:
    """Map inputs [..., M] to outputs [..., N] by a weight without a gradient."""
    if weight_NM.dtype == inputs.dtype:
        return functional.linear(inputs, weight_NM, bias_N)
    outputs: Tensor = FrozenProduct.apply(inputs, weight_NM, scales_NB, bias_N)
    return outputs
