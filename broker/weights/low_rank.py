"""Low-rank changes of matrices, added so that every machine gets the same bits.

    merged = weight + scale * (B @ A)

A matrix product sums in an order that depends on library, processor and threads. Here the product
is added up column by column, by multiplications and additions of single elements, whose results
IEEE 754 fixes. So what the learner publishes, on a GPU or a CPU, and what an actor computes from
the adapter have the same digest.

The sum is rounded to bfloat16 up or down, and up the more often the nearer it is to the upper of
its two neighbours on the grid. Rounding to the nearest would lose small changes: a frozen weight
lies on the grid, and most changes of the first batches are less than half a step. The direction
depends on the element's row and column alone: it is the same on every machine, and an element that
was rounded up stays up while its change grows.

Shapes: N rows, M columns of the matrix, R rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.protocol.manifest import AdapterSpec, TensorSpec, WeightManifest
from configs.errors import WeightsError

BLOCK = 2**16
"""Elements at a time, few enough for a core's caches."""
OF_ROW, OF_COLUMN, MIX, MIX_AGAIN = -0x61C88647, -0x7A143589, 0x7FEB352D, -0x7B935975
"""Odd numbers of a hash of row and column, which makes neighbours independent."""
Matrix = NDArray[np.float32]


def add_low_rank(weight_NM: Any, b_NR: Any, a_RM: Any, *, scale: float, block: int = BLOCK) -> None:
    """Add `scale * (b_NR @ a_RM)` to a matrix in place, of numpy or of torch.

    Args:
        weight_NM: The matrix; both factors have its kind and dtype.
        b_NR: The left factor.
        a_RM: The right factor.
        scale: Factor of their product.
        block: Elements at a time; does not change the result.
    """
    rows, rank = weight_NM.shape[0], a_RM.shape[0]
    assert b_NR.shape == (rows, rank) and a_RM.shape[1] == weight_NM.shape[1]
    step = max(1, block // max(1, weight_NM.shape[1]))
    for start in range(0, rows, step):
        part_NR = b_NR[start : start + step]
        product_NM = part_NR[:, :1] * a_RM[:1]
        for k in range(1, rank):
            product_NM += part_NR[:, k : k + 1] * a_RM[k : k + 1]
        product_NM *= scale
        weight_NM[start : start + step] += product_NM


def round_by_place(bits_NM: Any, rows_N: Any, columns_M: Any, *, block: int = BLOCK) -> None:
    """Round float32 to values of bfloat16 in place, without bias; values of bfloat16 stay.

    Args:
        bits_NM: Bits of the values as int32, of numpy or of torch; rows and columns as well.
        rows_N: Numbers of the rows in the whole matrix, int32.
        columns_M: Numbers of the columns in the whole matrix, int32.
        block: Elements at a time; does not change the result.
    """
    step = max(1, block // max(1, bits_NM.shape[1]))
    for start in range(0, bits_NM.shape[0], step):
        part_NM = bits_NM[start : start + step]
        # The finalizer of a 32-bit hash: products wrap, and shifts are masked, as int32 has a sign.
        mixed_NM = rows_N[start : start + step, None] * OF_ROW + columns_M[None] * OF_COLUMN
        mixed_NM ^= (mixed_NM >> 16) & 0xFFFF
        mixed_NM *= MIX
        mixed_NM ^= (mixed_NM >> 15) & 0x1FFFF
        mixed_NM *= MIX_AGAIN
        part_NM += (mixed_NM >> 16) & 0xFFFF
        part_NM &= -0x10000


def apply_adapter(adapter: bytes | bytearray, memory: Any, manifest: WeightManifest) -> None:
    """Turn the bytes of the base in `memory` into those of a version, in place.

    Args:
        adapter: Bytes of the adapter.
        memory: A buffer with the layout of the manifest.
        manifest: Manifest of the version, which has an adapter.

    Raises:
        WeightsError: The adapter does not have the manifest's layout; `memory` is unchanged.

    Uses all processor cores.
    """
    spec = manifest.adapter
    assert spec is not None
    parts = list(_parts(adapter, manifest.tensors, spec))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy needs no interpreter lock
        for _ in pool.map(lambda part: _merge(memory, *part, scale=spec.scale), parts):
            pass


def _parts(
    adapter: bytes | bytearray, tensors: tuple[TensorSpec, ...], spec: AdapterSpec
) -> Iterator[tuple[TensorSpec, Matrix, Matrix]]:
    """Cut an adapter into the matrices that it changes, with B and A."""
    numbers = np.frombuffer(adapter, dtype="<f4")
    at = 0
    for place in spec.tensors:
        shape = tensors[place].shape if 0 <= place < len(tensors) else ()
        if len(shape) != 2 or spec.rank < 1:
            raise WeightsError(
                f"an adapter must be of rank >= 1 for matrices of the version, got rank "
                f"{spec.rank} for number {place} of {len(tensors)} with shape {shape}; use the "
                "same release of Nyala on all machines"
            )
        rows, columns = shape
        between, end = at + spec.rank * columns, at + spec.rank * (columns + rows)
        a_RM, b_NR = numbers[at:between], numbers[between:end]
        at = end
        if end <= len(numbers):
            yield tensors[place], b_NR.reshape(rows, -1), a_RM.reshape(-1, columns)
    if at != len(numbers):
        raise WeightsError(
            f"the adapter's matrices must have {at} numbers, got {len(numbers)}; it is cut off "
            "or of another model: fetch it again"
        )


def _merge(memory: Any, spec: TensorSpec, b_NR: Matrix, a_RM: Matrix, *, scale: float) -> None:
    """Change one matrix in wire bytes."""
    dtype = {"float32": "<f4", "bfloat16": "<u2"}[spec.dtype]
    count = spec.shape[0] * spec.shape[1]
    wire = np.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset).reshape(spec.shape)
    if spec.dtype == "float32":
        add_low_rank(wire, b_NR, a_RM, scale=scale)
        return
    weight_NM = (wire.astype("<u4") << 16).view("<f4")
    add_low_rank(weight_NM, b_NR, a_RM, scale=scale)
    rows_N, columns_M = (np.arange(size, dtype="<i4") for size in spec.shape)
    round_by_place(weight_NM.view("<i4"), rows_N, columns_M)
    wire[:] = weight_NM.view("<u4") >> 16
