"""Sparse updates: the changed bits between two versions of weights, in a fraction of their bytes.

A step at a learning rate of 1e-6 moves most bfloat16 weights by less than half of their last bit,
so they stay as they are; the smaller a weight, the smaller its last bit, and the sooner it changes.
Both sides have the old weights. So an update goes through them in the order of their exponents:
frequent changes lie close together there, and rare ones far apart, so that the gaps between them
need few bits. How far a weight moves is counted in its last bit: most often it is by one.

    update  = segment of 1 Mi elements, segment, ...
    segment = number of changes, length of the rest; gaps; moves (0, 1, 2, 3: by -1, 1, -2, 2 ...)

The learner's publisher encodes, actors apply. Free of tensors, versions and digests: the caller
checks the digest after applying an update.
"""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import WeightsError

from .rice_coding import DAMAGED, decode_numbers, encode_numbers

SEGMENT = 2**20
"""Elements that are compared at a time: bounds the memory beside the two versions."""
MAX_DENSITY = 1 / 8
"""Share of changed elements above which an update is hardly shorter than all bytes."""

_HEAD = struct.Struct("<II")
Elements = NDArray[np.unsignedinteger[Any]]


def elements(memory: Any, dtype: str) -> Elements:
    """See wire bytes as unsigned integers, one for each weight.

    Args:
        memory: A buffer; writing to the result writes to it.
        dtype: `float32` or `bfloat16`.
    """
    return np.frombuffer(memory, dtype={"float32": "<u4", "bfloat16": "<u2"}[dtype])


def encode_changes(old: Elements, new: Elements) -> tuple[bytes | None, int]:
    """Encode how `new` [N] differs from `old` [N].

    Returns:
        The update, or None where so much has changed that all bytes are as good; and the number of
        changed elements (so far, where it gave up).
    """
    assert old.shape == new.shape and old.dtype == new.dtype
    parts: list[bytes] = []
    num_changed = num_seen = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy sorts without the interpreter's lock
        for count, part in pool.map(_encode_segment, _segments(old), _segments(new)):
            num_changed += count
            num_seen += SEGMENT
            if num_changed > MAX_DENSITY * min(num_seen, len(new)):
                pool.shutdown(wait=False, cancel_futures=True)
                return None, num_changed
            parts += [_HEAD.pack(count, len(part)), part]
    return b"".join(parts), num_changed


def apply_changes(update: bytes | bytearray, target: Elements) -> None:
    """Turn the old version in `target` [N] into the new one, in place.

    Raises:
        WeightsError: This is no update for so many elements; `target` may be a mixture of both.
    """
    left, parts = memoryview(update), []
    for segment_S in _segments(target):
        count, length = _HEAD.unpack(_prefix(left, _HEAD.size))
        if count > len(segment_S):
            raise WeightsError(
                f"a segment of a sparse update must have at most {len(segment_S)} changes, got "
                f"{count}; {DAMAGED}"
            )
        parts.append((segment_S, count, _prefix(left[_HEAD.size :], length)))
        left = left[_HEAD.size + length :]
    if left:
        raise WeightsError(
            f"a sparse update must end with its last segment, got {len(left)} bytes more; {DAMAGED}"
        )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda part: _apply_segment(*part), parts):
            pass


def _segments(array: Elements) -> list[Elements]:
    return [array[start : start + SEGMENT] for start in range(0, len(array), SEGMENT)]


def _encode_segment(old_S: Elements, new_S: Elements) -> tuple[int, bytes]:
    is_changed_S = old_S != new_S
    count = int(np.count_nonzero(is_changed_S))
    if not count:
        return 0, b""
    order_S = _by_exponent(old_S)
    ranks_C = np.flatnonzero(is_changed_S[order_S])
    places_C = order_S[ranks_C]
    gaps_C = (np.diff(ranks_C, prepend=-1) - 1).astype(np.uint32)
    return count, encode_numbers(gaps_C) + encode_numbers(_moves(old_S[places_C], new_S[places_C]))


def _apply_segment(segment_S: Elements, count: int, part: memoryview) -> None:
    if not count:
        return
    gaps_C, left = decode_numbers(part, count)
    moves_C, left = decode_numbers(left, count)
    ranks_C = np.cumsum(gaps_C.astype(np.int64) + 1) - 1
    if left or ranks_C[-1] >= len(segment_S):
        raise WeightsError(
            f"the last change of a segment must be below {len(segment_S)}, without bytes after it, "
            f"got one at {ranks_C[-1]} with {len(left)} bytes after it; {DAMAGED}"
        )
    places_C = _by_exponent(segment_S)[ranks_C]
    segment_S[places_C] += _distances(moves_C).astype(segment_S.dtype)


def _by_exponent(bits_S: Elements) -> NDArray[np.intp]:
    """Return the order of elements by exponent, and by place where it is equal."""
    # Sign, 8 bits of exponent, and then as many bits of mantissa as there is room for.
    mantissa = 8 * bits_S.dtype.itemsize - 9
    return np.argsort((bits_S >> mantissa).astype(np.uint8), kind="stable")


def _moves(old_C: Elements, new_C: Elements) -> NDArray[np.uint32]:
    """Number the distances -1, 1, -2, 2, ... from 0 on; none is 0. They wrap around."""
    signed = np.dtype(f"<i{old_C.dtype.itemsize}")
    distances_C = (new_C - old_C).view(signed).astype(np.int64)
    return (2 * np.abs(distances_C) - 2 + (distances_C > 0)).astype(np.uint32)


def _distances(moves_C: NDArray[np.uint32]) -> NDArray[np.int64]:
    sizes_C = (moves_C >> 1).astype(np.int64) + 1
    return np.where(moves_C & 1, sizes_C, -sizes_C)


def _prefix(left: memoryview, length: int) -> memoryview:
    """Return the first bytes of an update, after checking that there are so many."""
    if length > len(left):
        raise WeightsError(
            f"a sparse update must have {length} bytes more, got {len(left)}; {DAMAGED}"
        )
    return left[:length]
