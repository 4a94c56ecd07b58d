"""Frames between an actor and an environment host: a length of four bytes, then JSON.

Both sides read what the other's code may have spoilt. JSON, because the host's Python need not have
a package of ours.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 16 * 2**20  # a prompt with the columns of its row


class MalformedFrame(ValueError):
    """What came is no frame."""


def pack_frame(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes.

    Raises:
        ValueError: It is too long, or holds what is no plain data.
    """
    try:
        body = json.dumps(message, default=_plain).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"what an environment gives must be plain data: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"what an environment gives must be at most {MAX_FRAME_BYTES:,} bytes, "
            f"got {len(body):,}"
        )
    return LENGTH.pack(len(body)) + body


def read_frame(file: BinaryIO) -> dict[str, Any] | None:
    """Return the next message; None = the other side has ended.

    Raises:
        MalformedFrame: There is something else.
    """
    header = file.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    length: int = LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {length:,} bytes")
    body = file.read(length)
    if len(body) < length:
        return None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(str(error)) from error
    if not isinstance(message, dict):
        raise MalformedFrame("a frame without names")
    return message


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's, all else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
