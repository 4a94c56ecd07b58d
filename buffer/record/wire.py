"""Records to msgpack and back, by msgspec; a refusal is worded once all else has failed.

msgspec turns an enum, a UUID, a date or a Decimal into text, and a dataclass into a map. A record
comes back as it was written, so `write` refuses these.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import msgpack
from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder

from configs.errors import RecordError

from .faults import refusal
from .schema import CompletionFields, EpisodeFields

Fields = TypeVar("Fields", EpisodeFields, CompletionFields)

EPISODE, COMPLETION = Decoder(EpisodeFields), Decoder(CompletionFields)
_ENCODER = Encoder()
_UNREADABLE = MsgspecError, ValueError, RecursionError  # UnicodeDecodeError: a ValueError


def write(fields: EpisodeFields | CompletionFields) -> bytes:
    """Turn fields of plain numbers and texts into bytes; `read` finds the rest of what is wrong.

    Raises:
        RecordError: a value is of another type, or has no form in msgpack; names the field.
    """
    try:
        if isinstance(fields, EpisodeFields):
            _check_plain_episode(fields)
        else:
            _check_plain_completion(fields)
        return _ENCODER.encode(fields)
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise refusal(fields, type(fields), error) from error


def read(decoder: Decoder[Fields], record: bytes) -> Fields:
    """Read bytes that are one map of this schema.

    Raises:
        RecordError: they are not; names what is wrong.
    """
    try:
        return decoder.decode(record)
    except _UNREADABLE as error:
        values = _values(record)
        if len(values) != 1:
            raise RecordError(
                f"a record must be one msgpack map, got {len(values)}; it is refused"
            ) from error
        raise refusal(values[0][0], decoder.type, error) from error


def read_several(decoder: Decoder[Fields], record: bytes) -> list[Fields]:
    """Read one map or several in a row; raises as `read` does."""
    try:
        return [decoder.decode(record)]
    except _UNREADABLE as error:
        values: list[tuple[object, int]] = _values(record)
        if len(values) == 1:
            raise refusal(values[0][0], decoder.type, error) from error
    ends = [0, *(end for _, end in values)]
    parts: list[Fields] = []
    for (value, _), (start, end) in zip(values, pairwise(ends), strict=True):
        try:
            parts.append(decoder.decode(record[start:end]))
        except _UNREADABLE as error:
            raise refusal(value, decoder.type, error) from error
    return parts


def _check_plain_episode(fields: EpisodeFields) -> None:
    _check_plain_completion(fields.completion)
    parts, metrics, text = fields.parts, fields.metrics, fields.text
    # Loops: sets of the types take twice the time on so few values.
    names = fields.purpose, fields.finish, fields.inc
    for word in (*names, *parts, *metrics, *text, *text.values()):
        if type(word) is not str:
            raise TypeError("a text is of another type")
    times = fields.started, fields.finished
    for real in (fields.reward, *times, *parts.values(), *metrics.values()):
        if type(real) is not float:
            raise TypeError("a number is of another type")
    if not type(fields.task_id) is type(fields.group_id) is int or type(text) is not dict:
        raise TypeError("a field is of another type")


def _check_plain_completion(fields: CompletionFields) -> None:
    for lineage, step, start in fields.versions:
        if not type(lineage) is type(step) is type(start) is int:
            raise TypeError("versions are of another type")
    for fence, incarnation, start in fields.fences:
        if not type(fence) is type(start) is int or type(incarnation) is not str:
            raise TypeError("fences are of another type")


def _values(record: bytes) -> list[tuple[object, int]]:
    """All msgpack values and where each ends; what does not parse to the last byte is refused."""
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(record), raw=False, strict_map_key=True, use_list=True
    )
    unpacker.feed(record)
    values: list[tuple[object, int]] = []
    try:
        while not values or values[-1][1] < len(record):
            value = unpacker.unpack()
            values.append((value, unpacker.tell()))
    except (msgpack.OutOfData, msgpack.UnpackException, ValueError, OverflowError) as error:
        name = type(error).__name__
        raise RecordError(
            f"a record must be complete msgpack, got {len(record)} bytes that end in {name}"
        ) from error
    return values
