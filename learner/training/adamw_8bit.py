"""AdamW for matrices whose moments take a byte for each element, in place of four.

    moment = scale of its block * level of its code

A block is part of one row, so pieces of rows are whole blocks, and any number of ranks can load
a checkpoint. The 256 levels lie the denser the smaller they are ("dynamic tree", Dettmers et al.
2022, arXiv:2110.02861). The second moment is kept as its root, which spans half of the decades, so
none is rounded to 0, by which a step would be divided.

Shapes: R rows of a piece, C columns, N blocks of K in a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from learner.model.memory_rules import BLOCK
from learner.model.saved_model import local_of

PIECE = 2**21
"""Elements that are in float32 at a time."""
DECADES = 7
EPSILON = 1e-8


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are kept as codes and scales."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradients to the parameters."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state |= _before_first_step(parameter)
        state["step"] += 1
        locals_ = {name: local_of(tensor) for name, tensor in state.items() if name != "step"}
        weight_RC, gradient_RC = local_of(parameter.detach()), local_of(gradient)
        rows = max(1, PIECE // weight_RC.shape[1])
        for start in range(0, len(weight_RC), rows):
            here = slice(start, start + rows)
            moments = {name: tensor[here] for name, tensor in locals_.items()}
            _update(weight_RC[here], gradient_RC[here], moments, state["step"].double(), group)


def zeros_for(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make zeros, sharded as the parameter is where they have its rows, else whole."""
    whole = parameter.detach()
    if shape == tuple(whole.shape):
        return torch.zeros_like(whole, dtype=dtype)
    if len(shape) == whole.ndim == 2 and shape[0] == whole.shape[0]:
        return torch.zeros_like(whole.narrow(1, 0, shape[1]), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=whole.device)


def _before_first_step(parameter: Tensor) -> dict[str, Tensor]:
    rows, columns = parameter.shape
    state = {"step": zeros_for(parameter, (), torch.float32)}
    for name in ("exp_avg", "root"):
        blocks = (rows, -(-columns // BLOCK))
        state[f"{name}_codes"] = zeros_for(parameter, (rows, columns), torch.uint8)
        state[f"{name}_scales"] = zeros_for(parameter, blocks, torch.float32)
    return state


def _update(
    weight_RC: Tensor,
    gradient_RC: Tensor,
    moments: dict[str, Tensor],
    step: Tensor,
    group: dict[str, Any],
) -> None:
    """Update some rows and their moments, in place."""
    device, rate, (beta1, beta2) = weight_RC.device, group["lr"], group["betas"]
    first = moments["exp_avg_codes"], moments["exp_avg_scales"], levels(device, signed=True)
    root = moments["root_codes"], moments["root_scales"], levels(device, signed=False)

    first_RC = decode(*first).lerp_(gradient_RC, 1 - beta1)
    root_RC = decode(*root).square_().mul_(beta2)
    root_RC.addcmul_(gradient_RC, gradient_RC, value=1 - beta2).sqrt_()
    divisor_RC = (root_RC / (1 - beta2**step).sqrt()).add_(EPSILON)
    weight_RC.mul_(1 - rate * group["weight_decay"])
    weight_RC.addcdiv_(first_RC * (rate / (1 - beta1**step)), divisor_RC, value=-1)

    encode(first_RC, *first)
    encode(root_RC, *root)


@cache
def levels(device: torch.device, *, signed: bool) -> Tensor:
    """List the 256 values of codes, ascending, the largest 1: twice as many in each decade."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - DECADES)
        values += [*middles.tolist(), *((-middles).tolist() if signed else [])]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def decode(codes_RC: Tensor, scales_RN: Tensor, levels_256: Tensor) -> Tensor:
    """Return the moments. Shape [R, C], float32."""
    blocks_RNK = _blocks(levels_256[codes_RC.int()])
    return (blocks_RNK * scales_RN[..., None]).flatten(1)[:, : codes_RC.shape[1]]


def encode(moments_RC: Tensor, codes_RC: Tensor, scales_RN: Tensor, levels_256: Tensor) -> None:
    """Write the codes of the levels next to the moments, and the scales of their blocks."""
    blocks_RNK = _blocks(moments_RC)
    scales_RN.copy_(blocks_RNK.abs().amax(-1))
    ratios_RNK = blocks_RNK / scales_RN.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    edges = (levels_256[1:] + levels_256[:-1]) / 2
    found_RNK = torch.bucketize(ratios_RNK, edges, out_int32=True)
    codes_RC.copy_(found_RNK.flatten(1)[:, : codes_RC.shape[1]])
    if levels_256[0] == 0:
        codes_RC.clamp_(min=1)  # rounded up, a root makes steps shorter


def _blocks(values_RC: Tensor) -> Tensor:
    """Cut rows into blocks, the last filled up with zeros. Shape [R, N, K]."""
    columns = values_RC.shape[1]
    filled_RC: Tensor = functional.pad(values_RC, (0, -columns % BLOCK))
    return filled_RC.view(len(values_RC), -1, BLOCK)
