"""Orders to the member in vLLM's worker, and its answers: one line of JSON each.

Producer of orders: the actor (`actors/weights/worker_line.py`). Producer of answers: the worker
(`worker_member.py`). Both are this user's processes on one machine, and meet at a socket in a
folder that only this user may enter.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct
from msgspec.json import Decoder, Encoder

from broker.protocol.weight_messages import Epoch

MAX_LINE_BYTES = 2**16
"""Far more than an epoch or a path takes."""


class Enter(Struct, frozen=True, tag=True):
    """Be a member of this group from now on."""

    number: int
    """Number of this order; its answer has the same."""
    epoch: Epoch


class Receive(Struct, frozen=True, tag=True):
    """Fill this file with the bytes that the group sends."""

    number: int
    path: str
    num_bytes: int


class Leave(Struct, frozen=True, tag=True):
    """Leave the group; there is no answer."""


class OrderReply(Struct, frozen=True):
    """What became of an order."""

    number: int
    digest: str = ""
    """Digest of the bytes that a Receive has brought."""
    fault: str = ""
    """Why the order failed; empty = it did not."""


Order: TypeAlias = Enter | Receive | Leave

_ENCODER = Encoder()
_ORDERS: Decoder[Order] = Decoder(Enter | Receive | Leave)
_ANSWERS = Decoder(OrderReply)


def line_of(message: Order | OrderReply) -> bytes:
    """Return a message as a line."""
    return _ENCODER.encode(message) + b"\n"


def order_of(line: bytes) -> Order:
    """Read an order from a line."""
    return _ORDERS.decode(line)


def answer_of(line: bytes) -> OrderReply:
    """Read an answer from a line."""
    return _ANSWERS.decode(line)
