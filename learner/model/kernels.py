"""Triton kernels of a layer: norm, rotary embedding and gated activation, forwards and backwards.

Each reads its inputs once and writes its outputs once; what lies between stays in registers. Values
are rounded where the layer of transformers rounds them, so that in 16 bits both give the same but
for the order of a sum. `fused.py` says which layers call them, and has no need of Triton to import.

Nothing is written over an input: activation checkpointing may have kept it for a second pass.

Shapes: T tokens, H heads, K width of a head, N rows, M columns.
"""

# ruff: noqa: ANN001, ANN202, PLR0917 - as Triton's kernels are written, and autograd calls
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
ELEMENTS = 4096
"""Elements of a tile of several rows."""
PROGRAMS_PER_PROCESSOR = 8
"""Programs of the norm's backward pass; each sums its rows' part of the weight's gradient."""


def _wide(dtype: torch.dtype) -> Any:
    """Return the data type that a kernel computes in."""
    return TYPES[torch.promote_types(dtype, torch.float32)]


@cache
def _processors(device: torch.device) -> int:
    is_card = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_card else 1


def _tile(columns: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    width = triton.next_power_of_2(columns)
    return max(1, ELEMENTS // width), width


# --------------------------------------------------------------------------------------------------
# Root mean square norm: y = x / sqrt(mean(x^2) + eps) * (offset + weight).


@triton.jit
def _norm_forward(
    x_ptr, added_ptr, total_ptr, weight_ptr, y_ptr, root_ptr, rows, columns, inner, outer, step,
    ADDS: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    is_here = is_row[:, None] & is_column[None, :]
    place = row[:, None] * columns + column[None, :]
    read = (row // inner * outer + row % inner * step)[:, None] + column[None, :]
    narrow = tl.load(x_ptr + read, mask=is_here, other=0.0)
    x = narrow.to(WIDE)
    if ADDS:
        x += tl.load(added_ptr + place, mask=is_here, other=0.0).to(WIDE)
        tl.store(total_ptr + place, x.to(narrow.dtype), mask=is_here)
        x = x.to(narrow.dtype).to(WIDE)
    root = tl.rsqrt(tl.sum(x * x, 1) / columns + EPS)
    tl.store(root_ptr + row, root, mask=is_row)
    normed = x * root[:, None]
    if ROUNDS_FIRST:
        normed = normed.to(narrow.dtype).to(WIDE)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(WIDE) + OFFSET
    tl.store(y_ptr + place, (normed * weight[None, :]).to(narrow.dtype), mask=is_here)


@triton.jit
def _norm_backward(
    slope_ptr, of_total_ptr, x_ptr, weight_ptr, root_ptr, of_x_ptr, of_weight_ptr,
    rows, columns, inner, outer, step, ADDS_OF_TOTAL: tl.constexpr,
    OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_column = column < columns
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(WIDE) + OFFSET
    of_weight = tl.zeros((ROWS, COLUMNS), dtype=WIDE)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < rows
        is_here = is_row[:, None] & is_column[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        read = (row // inner * outer + row % inner * step)[:, None] + column[None, :]
        narrow = tl.load(x_ptr + read, mask=is_here, other=0.0)
        slope = tl.load(slope_ptr + place, mask=is_here, other=0.0).to(WIDE)
        root = tl.load(root_ptr + row, mask=is_row, other=0.0)[:, None]
        normed = narrow.to(WIDE) * root
        of_normed = slope * weight[None, :]
        if ROUNDS_FIRST:
            of_normed = of_normed.to(narrow.dtype).to(WIDE)
            of_weight += slope * normed.to(narrow.dtype).to(WIDE)
        else:
            of_weight += slope * normed
        along = tl.sum(of_normed * normed, 1)[:, None] / columns
        of_x = root * (of_normed - normed * along)
        if ADDS_OF_TOTAL:
            of_x += tl.load(of_total_ptr + place, mask=is_here, other=0.0).to(WIDE)
        tl.store(of_x_ptr + place, of_x.to(narrow.dtype), mask=is_here)
    tl.store(of_weight_ptr + program * columns + column, tl.sum(of_weight, 0), mask=is_column)


@triton.jit
def _add_up(
    parts_ptr, sum_ptr, parts, columns,
    WIDE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PARTS, COLUMNS), dtype=WIDE)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        is_here = (part < parts)[:, None] & (column < columns)[None, :]
        place = part[:, None] * columns + column[None, :]
        total += tl.load(parts_ptr + place, mask=is_here, other=0.0)
    narrow = tl.sum(total, 0).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + column, narrow, mask=column < columns)


def _rows_of(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return the tensor to read; rows of a group; steps to the next group, and to the next row."""
    if len(x) == x.stride(-1) == 1 and x.dim() in {3, 4}:
        return x, (1, x.stride(1), 0) if x.dim() == 3 else (x.shape[2], x.stride(1), x.stride(2))
    return x.contiguous(), (1, x.shape[-1], 0)


class Norm(Function):
    """The norm of each row of `x`, times a weight.

    With `returns_sum`, the norm of the sum of `x` and `added`, if there is one, and that sum too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_M: Tensor,
        eps: float,
        offset: float,
        rounds_first: bool,
        returns_sum: bool = False,
        added: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x, read = _rows_of(x)
        columns = x.shape[-1]
        rows = x.numel() // columns
        height, width = _tile(columns)
        y = x.new_empty(x.shape)
        roots_N = x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.how = {"OFFSET": offset, "ROUNDS_FIRST": rounds_first, "WIDE": _wide(x.dtype)}
        ctx.how |= {"ROWS": height, "COLUMNS": width, "num_warps": _warps(height * width)}
        total = x if added is None else x.new_empty(x.shape)
        if rows:
            _norm_forward[triton.cdiv(rows, height),](
                x, None if added is None else added.contiguous(), total, weight_M, y, roots_N,
                rows, columns, *read, ADDS=added is not None, EPS=eps, **ctx.how,
            )  # fmt: skip
        ctx.read, ctx.adds = read if added is None else _rows_of(total)[1], added is not None
        ctx.save_for_backward(total, weight_M, roots_N)
        return (y, total.view_as(total)) if returns_sum else y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight_M, roots_N = ctx.saved_tensors
        slope, *of_total = (gradient.contiguous() for gradient in grad_outputs)
        columns = x.shape[-1]
        most = PROGRAMS_PER_PROCESSOR * _processors(x.device)
        programs = max(1, min(most, triton.cdiv(len(roots_N), ctx.how["ROWS"])))
        of_x = x.new_empty(x.shape)
        parts = roots_N.new_empty(programs, columns)
        _norm_backward[programs,](
            slope, of_total[0] if of_total else None, x, weight_M, roots_N, of_x, parts,
            len(roots_N), columns, *ctx.read, ADDS_OF_TOTAL=bool(of_total), **ctx.how,
        )  # fmt: skip
        of_weight_M = torch.empty_like(weight_M)
        _add_up[triton.cdiv(columns, 32),](
            parts, of_weight_M, programs, columns,
            WIDE=ctx.how["WIDE"], PARTS=128, COLUMNS=32, num_warps=8,
        )  # fmt: skip
        return of_x, of_weight_M, None, None, None, None, of_x if ctx.adds else None


def _warps(elements: int) -> int:
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16


# --------------------------------------------------------------------------------------------------
# Rotary embedding of queries and keys, whose halves are turned by the same angles.


@triton.jit
def _turn(
    x_ptr, y_ptr, stride, heads, cos, sin, WIDE: tl.constexpr, PRODUCT: tl.constexpr,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head, column = tl.arange(0, HEADS).to(tl.int64), tl.arange(0, WIDTH)  # of a row of any length
    is_here = (head < heads)[:, None] & (column < HALF)[None, :]
    read = head[:, None] * stride + column[None, :]
    first = tl.load(x_ptr + read, mask=is_here, other=0.0)
    second = tl.load(x_ptr + read + HALF, mask=is_here, other=0.0)
    a, b = first.to(WIDE), second.to(WIDE)
    a_cos, b_cos = (a * cos).to(PRODUCT).to(WIDE), (b * cos).to(PRODUCT).to(WIDE)
    a_sin, b_sin = (a * sin).to(PRODUCT).to(WIDE), (b * sin).to(PRODUCT).to(WIDE)
    if BACK:
        turned, other = a_cos + b_sin, b_cos - a_sin
    else:
        turned, other = a_cos - b_sin, b_cos + a_sin
    write = head[:, None] * (2 * HALF) + column[None, :]
    tl.store(y_ptr + write, turned.to(first.dtype), mask=is_here)
    tl.store(y_ptr + write + HALF, other.to(first.dtype), mask=is_here)


@triton.jit
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_token, q_head, k_token, k_head, table, q_heads, k_heads,
    WIDE: tl.constexpr, PRODUCT: tl.constexpr, BACK: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_here = column < HALF
    cos = tl.load(cos_ptr + token * table + column, mask=is_here, other=0.0).to(WIDE)[None, :]
    sin = tl.load(sin_ptr + token * table + column, mask=is_here, other=0.0).to(WIDE)[None, :]
    _turn(
        q_ptr + token * q_token, q_out_ptr + token * q_heads * 2 * HALF, q_head, q_heads, cos, sin,
        WIDE, PRODUCT, BACK, Q_HEADS, HALF, WIDTH,
    )  # fmt: skip
    _turn(
        k_ptr + token * k_token, k_out_ptr + token * k_heads * 2 * HALF, k_head, k_heads, cos, sin,
        WIDE, PRODUCT, BACK, K_HEADS, HALF, WIDTH,
    )  # fmt: skip


class Rotate(Function):
    """Queries and keys, turned by the angles of their tokens' places."""

    @staticmethod
    def forward(
        ctx: Any, q_1HTK: Tensor, k_1GTK: Tensor, cos_TK: Tensor, sin_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_TK, sin_TK)
        return _rotated(q_1HTK, k_1GTK, cos_TK, sin_TK, back=False)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        return *_rotated(*grad_outputs, *ctx.saved_tensors, back=True), None, None


def _rotated(
    q_1HTK: Tensor, k_1GTK: Tensor, cos_TK: Tensor, sin_TK: Tensor, *, back: bool
) -> tuple[Tensor, Tensor]:
    """Turn forth or back; each token's heads lie behind each other, as a product gives them."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_1HTK, k_1GTK))
    _, q_heads, tokens, width = q.shape
    q_out, k_out = (x.new_empty(tokens, x.shape[1], width) for x in (q, k))
    half = width // 2
    product = torch.promote_types(q.dtype, cos_TK.dtype)
    if tokens:
        _rotate[tokens,](
            q, k, cos_TK, sin_TK, q_out, k_out,
            q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos_TK.stride(0),
            q_heads, k.shape[1], WIDE=_wide(product), PRODUCT=TYPES[product], BACK=back,
            Q_HEADS=triton.next_power_of_2(q_heads), K_HEADS=triton.next_power_of_2(k.shape[1]),
            HALF=half, WIDTH=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip
    return q_out.transpose(0, 1)[None], k_out.transpose(0, 1)[None]


# --------------------------------------------------------------------------------------------------
# Gated activation: activation(gate) * up, with the activation SiLU or GELU by its tanh form.

BLOCK = 2048
"""Columns of a program."""


@triton.jit
def _activate(gate, IS_SILU: tl.constexpr):
    """Return the activation and its slope."""
    if IS_SILU:
        share = tl.sigmoid(gate)
        return gate * share, share * (1 + gate * (1 - share))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        of_inner = 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * of_inner


@triton.jit
def _gate_forward(
    gate_ptr, up_ptr, y_ptr, gate_row, up_row, columns,
    IS_SILU: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < columns
    narrow = tl.load(gate_ptr + row * gate_row + column, mask=is_here, other=0.0)
    up = tl.load(up_ptr + row * up_row + column, mask=is_here, other=0.0).to(WIDE)
    active, _slope = _activate(narrow.to(WIDE), IS_SILU)
    active = active.to(narrow.dtype).to(WIDE)
    tl.store(y_ptr + row * columns + column, (active * up).to(narrow.dtype), mask=is_here)


@triton.jit
def _gate_backward(
    slope_ptr, gate_ptr, up_ptr, of_gate_ptr, of_up_ptr, gate_row, up_row, of_row, columns,
    IS_SILU: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < columns
    place = row * of_row + column
    slope = tl.load(slope_ptr + row * columns + column, mask=is_here, other=0.0).to(WIDE)
    narrow = tl.load(gate_ptr + row * gate_row + column, mask=is_here, other=0.0)
    up = tl.load(up_ptr + row * up_row + column, mask=is_here, other=0.0).to(WIDE)
    active, of_active = _activate(narrow.to(WIDE), IS_SILU)
    active = active.to(narrow.dtype).to(WIDE)
    to_active = (slope * up).to(narrow.dtype).to(WIDE)
    tl.store(of_gate_ptr + place, (to_active * of_active).to(narrow.dtype), mask=is_here)
    tl.store(of_up_ptr + place, (slope * active).to(narrow.dtype), mask=is_here)


def _gate(gate: Tensor, up: Tensor, is_silu: bool) -> Tensor:
    columns = gate.shape[-1]
    y = gate.new_empty(gate.shape)
    rows = y.numel() // columns
    if rows:
        _gate_forward[rows, triton.cdiv(columns, BLOCK)](
            gate, up, y, gate.stride(-2), up.stride(-2), columns,
            IS_SILU=is_silu, WIDE=_wide(gate.dtype), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return y


def _gate_slopes(
    slope: Tensor, gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor, is_silu: bool
) -> None:
    """Fill in both gradients, whose rows lie equally far from each other."""
    slope, columns = slope.contiguous(), gate.shape[-1]
    rows = slope.numel() // columns
    if rows:
        _gate_backward[rows, triton.cdiv(columns, BLOCK)](
            slope, gate, up, of_gate, of_up,
            gate.stride(-2), up.stride(-2), of_gate.stride(-2), columns,
            IS_SILU=is_silu, WIDE=_wide(gate.dtype), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


class Gate(Function):
    """The activation of a gate times what passes it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, is_silu: bool) -> Tensor:
        ctx.is_silu = is_silu
        ctx.save_for_backward(gate, up)
        return _gate(gate, up, is_silu)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        _gate_slopes(grad_outputs[0], gate, up, of_gate, of_up, ctx.is_silu)
        return of_gate, of_up, None


class JoinedGate(Function):
    """The activation of a gate times what passes it, both in one tensor, gates first."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, is_silu: bool) -> Tensor:
        ctx.is_silu = is_silu
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return _gate(gate, up, is_silu)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (both,) = ctx.saved_tensors
        of_both = both.new_empty(both.shape)
        (gate, up), (of_gate, of_up) = both.chunk(2, -1), of_both.chunk(2, -1)
        _gate_slopes(grad_outputs[0], gate, up, of_gate, of_up, ctx.is_silu)
        return of_both, None
