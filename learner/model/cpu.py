"""Faster steps on a CPU: linear layers by oneDNN, and freed memory that is kept."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

# --------------------------------------------------------------------------------------------------
# The memory that a step frees, kept for the next one instead of given back to the kernel.
#
# glibc gives the end of its heap back once some megabytes of it are free, and the kernel clears
# each page anew when it is next touched: thousands of them in each step of a small model.

TRIM, MMAP = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of <malloc.h>."""
MOST_KEPT = 2**28
"""Bytes at the end of the heap that may stay free."""
LARGEST = 2**25
"""Bytes of the largest block that comes from the heap, which is what glibc allows."""


def keep_freed_memory() -> bool:
    """Keep freed memory in this process; False where it stays as it was.

    That is where the C library cannot, or variables `MALLOC_...` of the environment configure it.
    """
    library = ctypes.CDLL(None)
    if any(name.startswith("MALLOC_") for name in os.environ) or not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(TRIM, MOST_KEPT) and library.mallopt(MMAP, LARGEST))


# --------------------------------------------------------------------------------------------------
# Products of linear layers by oneDNN, on CPUs for which MKL has no AVX-512.
#
# Torch multiplies float32 matrices by MKL, which computes with AVX-512 on Intel's processors alone.
# oneDNN, which torch carries too, does so on AMD's: about twice as fast there, forwards and
# backwards. Its sums are in another order, so results differ in their last bits from those of MKL;
# the same matrices give the same bits again. Each number of rows costs it half a millisecond once.
#
# Shapes: T tokens, M inputs, N outputs.

CPU_INFO = Path("/proc/cpuinfo")


def choose_products(modules: Iterable[nn.Module], device_type: str) -> None:
    """Let linear layers multiply by oneDNN where that is faster; before they are sharded."""
    if device_type == "cpu" and is_faster():
        for module in modules:
            if type(module) is nn.Linear:
                module.forward = partial(_linear, module)  # type: ignore[method-assign]


@cache
def is_faster() -> bool:
    """Whether oneDNN has a form of AVX-512 for this processor, and MKL has none."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return CPU_INFO.exists() and "GenuineIntel" not in CPU_INFO.read_text(encoding="utf-8")


def _linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    is_known = inputs.dtype == weight.dtype == torch.float32
    if not (is_known and inputs.numel()):
        return functional.linear(inputs, weight, bias)
    outputs: Tensor = LinearMap.apply(inputs, weight, bias)
    return outputs


class LinearMap(Function):
    """`x W^T + b` with its gradients, three products."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_NM: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight_NM)
        return multiply(inputs, weight_NM, bias_N)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        inputs, weight_NM = ctx.saved_tensors
        of_inputs = of_weight_NM = of_bias_N = None
        slopes_TN = grad_outputs[0].reshape(-1, len(weight_NM))
        if ctx.needs_input_grad[0]:
            of_inputs = multiply(slopes_TN, weight_NM.T).view(inputs.shape)
        if ctx.needs_input_grad[1]:
            of_weight_NM = _multiply_transposed(slopes_TN, inputs.reshape(len(slopes_TN), -1))
        if ctx.needs_input_grad[2]:
            of_bias_N = slopes_TN.sum(0)
        return of_inputs, of_weight_NM, of_bias_N


def multiply(inputs: Tensor, weight_NM: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Map inputs [..., M] to outputs [..., N]; all float32 on a CPU."""
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight_NM, bias_N, "none", [], "")
    return outputs


def _multiply_transposed(slopes_TN: Tensor, inputs_TM: Tensor) -> Tensor:
    """Add up the outer products of all tokens. Shape [N, M]."""
    if slopes_TN.shape[1] <= inputs_TM.shape[1]:  # oneDNN copies its first argument, transposed
        return multiply(slopes_TN.T, inputs_TM.T)
    return multiply(inputs_TM.T, slopes_TN.T).T
