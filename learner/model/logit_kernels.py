"""Triton kernels for logits, which read them once and keep the rest in registers.

`LogitChunk` (`logits.py`) does the same by torch's operators, where a machine cannot run these.
They compute in float32, whatever the logits are in.

Shapes: C tokens of a chunk, V vocabulary.
"""

# ruff: noqa: ANN001, ANN202, PLR0917 - Triton compiles annotations too, and passes all by position
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Each place in a block has a maximum and sums of its own over all blocks of a row; they are merged.

BLOCK = 4096
"""Logits that a program has in registers at a time."""
PER_WARP = 512
LOWEST = tl.constexpr(-1e30)
"""Below all logits; finite, since the difference of two infinities is not a number."""


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _prepare(logits, inner, outer, HAS_CAP: tl.constexpr):
    wide = logits.to(tl.float32) * inner
    return _tanh(wide) * outer if HAS_CAP else wide


@triton.jit
def _measure(
    logits,
    places,
    measures,
    inner,
    outer,
    tokens,
    vocabulary,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocabulary
    columns = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        is_there = first + columns < vocabulary
        narrow = tl.load(row + first + columns, mask=is_there, other=0.0)
        x = _prepare(narrow, inner, outer, HAS_CAP)
        lower = x - tops
        is_higher = lower > 0
        power = tl.exp(-tl.abs(lower))  # of the smaller one, relative to the larger
        next_products = tl.where(
            is_higher, power * (products - sums * lower), products + power * lower
        )
        next_sums = tl.where(is_higher, sums * power + 1, sums + power)
        products = tl.where(is_there, next_products, products)
        sums = tl.where(is_there, next_sums, sums)
        tops = tl.where(is_there & is_higher, x, tops)
    top = tl.max(tops, 0)
    lower = tops - top
    factors = tl.exp(lower)
    chosen = _prepare(tl.load(row + tl.load(places + token)), inner, outer, HAS_CAP)
    tl.store(measures + token, top)
    tl.store(measures + tokens + token, chosen - top)
    tl.store(measures + 2 * tokens + token, tl.sum(factors * sums, 0))
    tl.store(measures + 3 * tokens + token, tl.sum(factors * (products + sums * lower), 0))


def measure(logits_CV: Tensor, places_C: Tensor, *, inner: float, outer: float | None) -> Tensor:
    """Compute the numbers that log-probs and entropies are made of.

    Args:
        logits_CV: Logits of the output layer.
        places_C: The chosen tokens.
        inner: Factor of the logits, within the cap where there is one.
        outer: Factor of the hyperbolic tangent of the product; None = there is no cap.

    Returns:
        Largest logit; less it, the chosen one, the sum of the powers and that of their products
        with the logits. Shape [4, C], float32.
    """
    tokens, vocabulary = logits_CV.shape
    measures_4C = torch.empty(4, tokens, dtype=torch.float32, device=logits_CV.device)
    sizes = _sizes(vocabulary)
    _measure[tokens,](
        logits_CV,
        places_C,
        measures_4C,
        inner,
        outer or 0.0,
        tokens,
        vocabulary,
        outer is not None,
        **sizes,
    )
    return measures_4C


# --------------------------------------------------------------------------------------------------
# The gradient of a loss in the place of the logits.


@triton.jit
def _differentiate(
    logits,
    places,
    log_sums,
    entropies,
    of_logprobs,
    of_entropies,
    inner,
    outer,
    vocabulary,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(vocabulary, BLOCK)
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < vocabulary
    pointers = logits + token * vocabulary + columns
    x = tl.load(pointers, mask=is_there, other=0.0).to(tl.float32) * inner
    slope = inner
    if HAS_CAP:
        x = _tanh(x)
        slope = inner * outer * (1 - x * x)
        x *= outer
    log_pi = x - tl.load(log_sums + token)
    of_logprob = tl.load(of_logprobs + token)
    weight = of_logprob
    if HAS_ENTROPIES:  # of the entropy H: -pi (log pi + H)
        weight += tl.load(of_entropies + token) * (log_pi + tl.load(entropies + token))
    is_chosen = columns == tl.load(places + token)
    gradient = tl.where(is_chosen, of_logprob, 0.0) - tl.exp(log_pi) * weight
    tl.store(pointers, (gradient * slope).to(logits.dtype.element_ty), mask=is_there)


def differentiate(
    logits_CV: Tensor,
    places_C: Tensor,
    log_sums_C: Tensor,
    entropies_C: Tensor,
    of_logprobs_C: Tensor,
    of_entropies_C: Tensor | None,
    *,
    inner: float,
    outer: float | None,
) -> None:
    """Put the gradient of a loss in the place of the logits.

    Args:
        logits_CV: Logits of the output layer.
        places_C: The chosen tokens; -1 = none of these.
        log_sums_C: Log of the sum of the logits' powers.
        entropies_C: Entropies of the distributions.
        of_logprobs_C: Derivatives of the loss by the chosen tokens' log-probs.
        of_entropies_C: Derivatives by the entropies; None = the loss does not depend on them.
        inner: As in `measure`.
        outer: As in `measure`.
    """
    tokens, vocabulary = logits_CV.shape
    sizes = _sizes(vocabulary)
    _differentiate[tokens * triton.cdiv(vocabulary, sizes["BLOCK"]),](
        logits_CV,
        places_C,
        log_sums_C,
        entropies_C,
        of_logprobs_C.contiguous(),
        None if of_entropies_C is None else of_entropies_C.contiguous(),
        inner,
        outer or 0.0,
        vocabulary,
        outer is not None,
        of_entropies_C is not None,
        **sizes,
    )


def _sizes(vocabulary: int) -> dict[str, int]:
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    return {"BLOCK": block, "num_warps": max(1, block // PER_WARP)}
