"""Codec of messages and task specs: one msgpack map {v, run, inc, seq, message} in one frame.

Owns the wire form and its limits (`fields.py`). Any input is a message of a wire version that is
served, or raises `RecordError`, never anything else. The meaning of messages lies elsewhere.

A version can serve the one before: messages of such a peer are read with the defaults of fields
that they lack, and a server answers in the peer's version. So actors of the release before go on
until they leave.

Example:
    frame = encode(Bye(), run="demo", incarnation="actor-1", seq=7)
    envelope = decode(frame, max_bytes=1 << 20)
    assert envelope.message == Bye()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgpack
from msgspec import Meta, MsgspecError, Raw, Struct
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import fields, replace

from configs.errors import RecordError, quoted

from .conversation_messages import ConversationMessage, Reward
from .fields import Text, WireMessage
from .manifest import WeightManifest
from .messages import BrokerMessage, TaskSpec
from .weight_messages import WeightMessage

# --------------------------------------------------------------------------------------------------
# Messages as a peer of the wire version before reads them.
#
# A version adds to a message only fields with a default, and the message has `omit_defaults`: a
# reader of the version before refuses unknown fields, so they must not be sent. A change that
# raises the wire version after a release fills these tables and lowers `OLDEST_VERSION`, after
# recording frames of the version before (`tests/broker/support/recorded_frames.py`).

WIRE_VERSION = 5
OLDEST_VERSION = WIRE_VERSION
"""Oldest version that is read and answered; no release has used an earlier one."""
ADDED_FIELDS: Mapping[type[WireMessage], tuple[str, ...]] = {}
ADDED_MESSAGES: tuple[type[WireMessage], ...] = ()
"""Messages that `WIRE_VERSION` has and `OLDEST_VERSION` has not."""


def is_known_to(version: int, message: object) -> bool:
    """Return whether a served wire version has a message of this kind."""
    return version >= WIRE_VERSION or not isinstance(message, ADDED_MESSAGES)


def as_known_to(version: int, message: WireMessage) -> WireMessage:
    """Return a message without the fields that this earlier wire version lacks.

    Raises:
        RecordError: That version has no such message.
    """
    if not is_known_to(version, message):
        raise RecordError(
            f"wire version must be one that has {type(message).__name__}, got {version}; update "
            "the older peer"
        )
    added = ADDED_FIELDS.get(type(message), ())
    if not added:
        return message
    defaults = {field.name: field.default for field in fields(message) if field.name in added}
    return replace(message, **defaults)


# --------------------------------------------------------------------------------------------------
# Codec of messages: one msgpack map {v, run, inc, seq, message} in one frame.

HEADER_FIELDS = 4
HEADER_BYTES = 1024  # with names as long as they may be

Frame = bytes | memoryview


class Envelope(Struct, frozen=True, forbid_unknown_fields=True):
    """A message and its header. Producer: `decode`. Consumer: the owner of the socket."""

    v: Annotated[int, Meta(ge=OLDEST_VERSION, le=WIRE_VERSION)]
    run: Text
    inc: Text
    """Incarnation of the sender."""
    seq: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Number of the request within its incarnation; the reply carries the same."""
    message: BrokerMessage | ConversationMessage | WeightMessage | WeightManifest


class Header(NamedTuple):
    """Header of a frame, read from its first bytes; empty or 0 where these are malformed."""

    incarnation: str = ""
    seq: int = 0
    op: str = ""
    version: int = WIRE_VERSION
    """Wire version of the answer: the sender's, if it is served."""


class _Version(Struct):
    """The field that every wire version has; a stranger may send any value."""

    v: Raw


_ENCODER = Encoder()
_ENVELOPES, _SPECS, _REWARDS = Decoder(Envelope), Decoder(TaskSpec), Decoder(Reward)
_VERSIONS, _NUMBERS = Decoder(_Version), Decoder(int)
_MALFORMED = (MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def encode(
    message: object, *, run: str, incarnation: str, seq: int, version: int = WIRE_VERSION
) -> bytes:
    """Turn a message into the bytes of its frame.

    Args:
        message: Message of the wire.
        run: Name of the run.
        incarnation: Incarnation of the sender.
        seq: Number of the request.
        version: Wire version of the reader.

    Raises:
        RecordError: This is no message of the wire, a value cannot be written as msgpack, or that
            version has no such message.
    """
    if not isinstance(message, WireMessage):
        raise RecordError(
            f"message must be a WireMessage, got {type(message).__name__}; send one of "
            "broker.protocol"
        )
    sent = message if version == WIRE_VERSION else as_known_to(version, message)
    return _encode(Envelope(version, run, incarnation, seq, sent))  # type: ignore[arg-type]


def decode(frame: Frame, *, max_bytes: int) -> Envelope:
    """Turn the bytes of a frame into a checked message.

    Raises:
        RecordError: There are more than `max_bytes` bytes, or they are not exactly one well-formed
            message of a served wire version.
    """
    if len(frame) > max_bytes:
        raise RecordError(
            f"a message must be at most {max_bytes} bytes, got {len(frame)}; use the same release "
            "of Nyala and the same broker.max_message_bytes on all machines"
        )
    try:
        return _ENVELOPES.decode(frame)
    except _MALFORMED as error:
        _check_version(frame)
        raise RecordError(
            f"a message must have the fields of its type, got: {error!s:.300}; use the same "
            "release of Nyala on all machines"
        ) from None


def header_of(frame: Frame) -> Header:
    """Return the sender, number, kind and wire version of a frame, as far as they can be read.

    Never raises. Reads only the first bytes, because a message that is refused anyway must be
    cheap.
    """
    reader = msgpack.Unpacker(raw=False, max_buffer_size=HEADER_BYTES, max_ext_len=0)
    reader.feed(frame[:HEADER_BYTES])
    values: dict[str, object] = {}
    try:
        for _ in range(min(reader.read_map_header(), HEADER_FIELDS)):
            name = reader.unpack()
            values[name] = reader.unpack()
        if reader.unpack() == "message" and reader.read_map_header() and reader.unpack() == "op":
            values["op"] = reader.unpack()
    except (msgpack.UnpackException, *_MALFORMED):
        pass
    incarnation, seq, op = values.get("inc"), values.get("seq"), values.get("op")
    version = values.get("v")
    return Header(
        incarnation if isinstance(incarnation, str) else "",
        seq if type(seq) is int and 0 <= seq < 2**63 else 0,
        op if isinstance(op, str) else "",
        version if type(version) is int and is_served(version) else WIRE_VERSION,
    )


def is_served(version: int) -> bool:
    """Return whether peers of this wire version are read and answered."""
    return OLDEST_VERSION <= version <= WIRE_VERSION


def encode_spec(spec: TaskSpec) -> bytes:
    """Turn a task's spec into the bytes that the store keeps with it."""
    return _encode(spec)


def decode_spec(stored: bytes) -> TaskSpec:
    """Turn stored bytes back into a task's spec.

    Raises:
        RecordError: The bytes are no spec of a task.
    """
    try:
        spec = _SPECS.decode(stored)
    except _MALFORMED as error:
        raise RecordError(
            f"a task must have the fields of its type, got: {error!s:.300}; use the same release "
            "of Nyala on all machines"
        ) from None
    if spec.purpose not in ("train", "eval"):
        raise RecordError(
            f"a task's purpose must be train or eval, got {quoted(spec.purpose, 20)}; use the same "
            "release of Nyala on all machines"
        )
    return spec


def encode_reward(reward: Reward) -> bytes:
    """Turn a reward of an agent into the bytes that the store keeps in its mailbox."""
    return _encode(reward)


def decode_reward(stored: bytes) -> Reward:
    """Turn stored bytes back into a reward.

    Raises:
        RecordError: The bytes are no reward.
    """
    try:
        return _REWARDS.decode(stored)
    except _MALFORMED as error:
        raise RecordError(
            f"a reward must have the fields of its type, got: {error!s:.300}; use the same release "
            "of Nyala on all machines"
        ) from None


def _encode(value: Struct) -> bytes:
    try:
        return _ENCODER.encode(value)
    except _MALFORMED as error:
        raise RecordError(
            f"a message must consist of values of msgpack, got one that fails: {error!s:.120}; "
            "send integers of at most 64 bits, floats, texts and bytes"
        ) from None


def _check_version(frame: Frame) -> None:
    """Raise if a frame that cannot be read is of another version."""
    try:
        version = _NUMBERS.decode(_VERSIONS.decode(frame).v)
    except _MALFORMED:
        return
    if not is_served(version):
        served = " or ".join(map(str, range(OLDEST_VERSION, WIRE_VERSION + 1)))
        raise RecordError(f"wire version must be {served}, got {version}; update the older peer")
