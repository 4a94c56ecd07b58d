"""Messages between an actor and its reward worker: a length of four bytes, then msgpack."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 * 2**20  # 64 completions of the largest episode would not fit: those are split


def pack_frame(message: Any) -> bytes:
    """Return a message as bytes with their length before them."""
    body = bytes(msgpack.packb(message) or b"")  # None only in its type
    return LENGTH.pack(len(body)) + body


def unpack_body(body: bytes) -> Any:
    """Return the message of a frame's body."""
    return msgpack.unpackb(body)
