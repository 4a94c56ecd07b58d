"""What has changed between two versions of weights, bit for bit, in a fraction of their bytes.

A step at a learning rate of 1e-6 moves most bfloat16 weights by less than half of their last bit,
so they stay as they are. An update says where the others lie, as gaps, and which of their bits
flip, as the exclusive or of old and new. Both are split into byte planes, because gaps between
changes at random places are geometric, and the bytes of a geometric number are independent of each
other; each plane is then compressed by itself.

    update  = segment of 1 Mi elements, segment, ...
    segment = number of changes, planes of the gaps (low byte first), planes of the bits
    plane   = length, deflated bytes

Knows nothing of tensors, versions or digests: whoever applies an update checks the digest after it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import WeightsError

SEGMENT = 2**20
"""Elements that are compared at a time: bounds the memory beside the two versions."""
GAP_PLANES = 3
"""Bytes of a gap: it is at most a segment."""
MAX_DENSITY = 1 / 8
"""Share of changed elements above which an update is hardly shorter than all bytes."""
LEVEL = 6
"""Of deflate: a tenth fewer bytes than level 1, in less time than the comparison takes."""

_COUNT = struct.Struct("<I")
Elements = NDArray[np.unsignedinteger[Any]]


def elements(memory: Any, dtype: str) -> Elements:
    """See wire bytes as unsigned integers, one for each weight.

    Args:
        memory: A buffer; what is written to the result is written to it.
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
    for start in range(0, len(new), SEGMENT):
        old_S, new_S = old[start : start + SEGMENT], new[start : start + SEGMENT]
        changed_C = np.flatnonzero(old_S != new_S)
        num_changed += len(changed_C)
        num_seen += len(new_S)
        if num_changed > MAX_DENSITY * num_seen:
            return None, num_changed
        parts.append(_COUNT.pack(len(changed_C)))
        parts += _planes(np.diff(changed_C, prepend=0).astype("<u4"), GAP_PLANES)
        parts += _planes(old_S[changed_C] ^ new_S[changed_C], new.dtype.itemsize)
    return b"".join(parts), num_changed


def apply_changes(update: bytes | bytearray, target: Elements) -> None:
    """Turn the old version in `target` [N] into the new one, in place.

    Raises:
        WeightsError: this is no update for so many elements; `target` is now a mixture.
    """
    reader = _Reader(memoryview(update))
    for start in range(0, len(target), SEGMENT):
        segment_S = target[start : start + SEGMENT]
        count = reader.count(at_most=len(segment_S))
        places_C = np.cumsum(reader.numbers(count, GAP_PLANES), dtype=np.int64)
        flips_C = reader.numbers(count, target.dtype.itemsize)
        if count and places_C[-1] >= len(segment_S):
            raise WeightsError(
                f"changes must lie within {len(segment_S)} elements, got one at {places_C[-1]}; "
                "the update is of another model"
            )
        segment_S[places_C] ^= flips_C.astype(target.dtype)
    reader.end()


def _planes(numbers_C: Elements, num_planes: int) -> Iterator[bytes]:
    bytes_CB = numbers_C.view(np.uint8).reshape(len(numbers_C), numbers_C.dtype.itemsize)
    for plane in range(num_planes):
        deflated = zlib.compress(np.ascontiguousarray(bytes_CB[:, plane]).tobytes(), LEVEL)
        yield _COUNT.pack(len(deflated)) + deflated


class _Reader:
    """Reads an update from its beginning; every length is checked before it is used."""

    def __init__(self, update: memoryview) -> None:
        self._left = update

    def count(self, *, at_most: int) -> int:
        count: int = _COUNT.unpack(self._take(_COUNT.size))[0]
        if count > at_most:
            raise WeightsError(f"a sparse update must count to <= {at_most} here, got {count}")
        return count

    def numbers(self, count: int, num_planes: int) -> NDArray[np.uint32]:
        """Join the planes of `count` numbers."""
        bytes_CB = np.zeros((count, 4), np.uint8)
        for plane in range(num_planes):
            deflated = self._take(self.count(at_most=len(self._left)))
            bytes_CB[:, plane] = np.frombuffer(_inflate(deflated, count), np.uint8)
        return bytes_CB.view("<u4")[:, 0]

    def end(self) -> None:
        if self._left:
            raise WeightsError(f"a sparse update must end here, got {len(self._left)} more bytes")

    def _take(self, length: int) -> memoryview:
        if length > len(self._left):
            raise WeightsError(
                f"a sparse update must hold {length} more bytes, got {len(self._left)}"
            )
        taken, self._left = self._left[:length], self._left[length:]
        return taken


def _inflate(deflated: memoryview, length: int) -> bytes:
    """Inflate to exactly `length` bytes: a small plane must not become a large one."""
    inflater = zlib.decompressobj()
    try:
        plane = inflater.decompress(deflated, length + 1)
    except zlib.error as error:
        raise WeightsError(f"a plane of a sparse update must inflate, got: {error}") from error
    if len(plane) != length or not inflater.eof:
        raise WeightsError(f"a plane of a sparse update must hold {length} bytes, got others")
    return plane
