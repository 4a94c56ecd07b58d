"""Adaptive Rice codes: whole numbers in few bits each, where small ones are frequent.

A number is split at bit k: the part above is written as so many zeros and a one, the k bits below
unchanged. With the right k that is within a few per cent of the entropy of a geometric
distribution, which the gaps between independent events have. Each block of numbers has its own k,
so that a change of scale within them costs little. `sparse.py` writes gaps and moves in it.

    numbers = k of each block, one byte; length of the upper parts; upper parts; lower parts

Source:
    Rice and Plaunt 1971, "Adaptive variable-length coding for efficient compression of spacecraft
    television data", IEEE Transactions on Communication Technology 19(6).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import WeightsError

BLOCK = 128
"""Numbers that share a k, whose byte adds a sixteenth of a bit to each."""
MAX_SPLIT = 31
DAMAGED = "this update is damaged or of another model: fetch the whole version"
"""End of all errors about bytes that are no update."""
_LENGTH = struct.Struct("<I")

Numbers = NDArray[np.unsignedinteger[Any]]


def encode_numbers(numbers_C: Numbers) -> bytes:
    """Encode numbers [C] below 2**32."""
    splits_B = _splits(numbers_C)
    splits_C = np.repeat(splits_B, BLOCK)[: len(numbers_C)]
    ends_C = np.cumsum((numbers_C >> splits_C) + 1, dtype=np.int64)
    upper = np.zeros(ends_C[-1] if len(ends_C) else 0, np.bool_)
    upper[ends_C - 1] = True
    bits_CK = np.unpackbits(numbers_C.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)
    packed = np.packbits(upper).tobytes()
    lower = np.packbits(bits_CK[_lower_bits(splits_C)]).tobytes()
    return splits_B.astype(np.uint8).tobytes() + _LENGTH.pack(len(packed)) + packed + lower


def decode_numbers(code: memoryview, count: int) -> tuple[NDArray[np.uint32], memoryview]:
    """Decode `count` numbers; return the numbers [C], and the bytes after them.

    Raises:
        WeightsError: The code holds fewer or more. Work is bounded by the length of the code.
    """
    splits_B, code = _take_bytes(code, -(-count // BLOCK))
    splits_C = np.repeat(splits_B.astype(np.uint32), BLOCK)[:count]
    length, code = _take_bytes(code, _LENGTH.size)
    packed, code = _take_bytes(code, int(length.view("<u4")[0]))
    ends_C = np.flatnonzero(np.unpackbits(packed))
    split = int(splits_B.max()) if count else 0
    if len(ends_C) != count or split > MAX_SPLIT:
        raise WeightsError(
            f"a part of a sparse update must have {count} numbers, split at bit {MAX_SPLIT} or "
            f"below, got {len(ends_C)}, split at {split}; {DAMAGED}"
        )
    is_lower_CK = _lower_bits(splits_C)
    num_bits = int(splits_C.sum())
    packed, code = _take_bytes(code, -(-num_bits // 8))
    bits_CK = np.zeros((count, 32), np.uint8)
    bits_CK[is_lower_CK] = np.unpackbits(packed)[:num_bits]
    lower_C = np.packbits(bits_CK, axis=1).view(">u4")[:, 0].astype(np.uint32)
    upper_C = np.diff(ends_C, prepend=-1) - 1
    return (upper_C.astype(np.uint32) << splits_C) | lower_C, code


def _splits(numbers_C: Numbers) -> NDArray[np.uint32]:
    """Choose k for each block: the bits of ln 2 times the mean, which is about the median."""
    if not len(numbers_C):
        return np.zeros(0, np.uint32)
    starts = np.arange(0, len(numbers_C), BLOCK)
    sums_B = np.add.reduceat(numbers_C.astype(np.float64), starts)
    means_B = sums_B / np.minimum(len(numbers_C) - starts, BLOCK)
    splits_B = np.ceil(np.log2(np.maximum(means_B * np.log(2), 1.0)))
    splits: NDArray[np.uint32] = splits_B.clip(0, MAX_SPLIT).astype(np.uint32)
    return splits


def _lower_bits(splits_C: Numbers) -> NDArray[np.bool_]:
    """Mark the bits below each k in rows of 32 bits, the highest first."""
    is_lower_CK: NDArray[np.bool_] = np.arange(32) >= 32 - splits_C[:, None].astype(np.int64)
    return is_lower_CK


def _take_bytes(code: memoryview, length: int) -> tuple[NDArray[np.uint8], memoryview]:
    """Return the first bytes of a code, and those after them."""
    if length > len(code):
        raise WeightsError(
            f"a sparse update must have {length} bytes more, got {len(code)}; {DAMAGED}"
        )
    return np.frombuffer(code[:length], np.uint8), code[length:]
