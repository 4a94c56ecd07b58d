"""Values as msgpack and back, within limits: a few bytes may claim to be a great many values."""

from __future__ import annotations

from typing import TypeVar

import msgpack

from configs.errors import RecordError

MAX_ITEMS = 65_536
"""Entries of one list: a manifest of a large mixture of experts has about 20 000 tensors."""
MAX_ELEMENTS = 2**20
"""List and map entries of one message: ten times the largest manifest. A byte on the wire can cost
sixty in memory as an empty list, so the total is bounded and not the bytes alone."""
FRAME_BYTES = 4 * 2**20
"""Room for nearly every message: a packer that grows copies what it has, which took an actor seven
times as long as all else about a megabyte. Pages that are not written cost nothing."""
MALFORMED = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)

_Container = TypeVar("_Container", list[object], dict[str, object])


class _Meter:
    """Counts what a frame unpacks to: it may be small on the wire and huge in memory."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_ELEMENTS

    def count(self, container: _Container) -> _Container:
        self.left -= len(container) + 1
        if self.left < 0:
            raise RecordError(f"a message must have at most {MAX_ELEMENTS} elements, got more")
        return container


def unpack(frame: bytes, *, max_bytes: int) -> object:
    """Turn bytes into the one value that they are.

    Raises:
        RecordError: they are not one value, or too large a one.
    """
    if len(frame) > max_bytes:
        raise RecordError(f"a message must be at most {max_bytes} bytes, got {len(frame)}")
    meter = _Meter()
    try:
        unpacked: object = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
            list_hook=meter.count,
            object_hook=meter.count,
        )
    except RecordError:
        raise
    except MALFORMED as error:
        raise RecordError(f"a message must be one msgpack value, got {error!r:.120}") from None
    return unpacked


def pack(wire: object) -> bytes:
    """Turn a value into bytes.

    Raises:
        RecordError: msgpack has no form for it.
    """
    try:
        packed = msgpack.Packer(use_bin_type=True, buf_size=FRAME_BYTES).pack(wire)
    except MALFORMED as error:
        raise RecordError(f"a message must fit msgpack, got {error!r:.120}") from None
    assert isinstance(packed, bytes)
    return packed
