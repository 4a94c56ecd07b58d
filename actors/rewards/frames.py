"""Messages between an actor and its reward worker: frames of msgpack."""

from __future__ import annotations

import msgspec

from configs.child import as_frame
from configs.errors import RewardError

from .functions import Convention, RewardSample

MAX_FRAME_BYTES = 64 * 2**20  # a batch of 64 of the largest episodes does not fit, and is split

RewardOutcome = tuple[float | None, str | None]
"""A reward, or the reason for a missing one; neither = the function does not count."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """First reply of a worker: how the function is called."""

    convention: Convention


class Refused(msgspec.Struct, frozen=True, tag=True):
    """First reply of a worker whose function cannot be used."""

    reason: str


class RewardOutcomes(msgspec.Struct, frozen=True, tag=True):
    """Later replies: the outcomes of the next samples, in order."""

    number: int
    """Number of the first of these samples since the worker began, to tell answers apart."""
    outcomes: list[RewardOutcome]


Reply = Loaded | Refused | RewardOutcomes


class MalformedReply(RewardError):
    """The bytes of a worker are no reply: its reward has written into a descriptor of frames."""


_SAMPLES = msgspec.msgpack.Decoder(list[RewardSample])
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def pack_frame(message: Reply | list[RewardSample]) -> bytes:
    """Return a message as bytes with their length before them.

    Raises:
        RewardError: The columns of a sample have a value that cannot be sent, such as a huge
            number.
    """
    try:
        body = msgspec.msgpack.encode(message, enc_hook=str)
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"columns of an item must fit into a message to its reward, got: {error}; write whole "
            "numbers of more than 64 bits as texts, and nest lists and maps less deeply"
        ) from error
    return as_frame(body)


def unpack_samples(body: bytes) -> list[RewardSample]:
    """Return the samples of a request's body."""
    return _SAMPLES.decode(body)


def unpack_reply(body: bytes) -> Reply:
    """Return the reply of a frame's body.

    Raises:
        MalformedReply: The body is no reply.
    """
    try:
        return _REPLY.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedReply(str(error)) from error
