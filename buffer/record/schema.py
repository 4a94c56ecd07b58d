"""Wire form of records: fields, their types and bounds, read and written by msgspec.

A record is one msgpack map; arrays travel as raw little-endian bytes, never as lists or pickle.
`rules.py` has what a schema cannot state. A refusal names what msgspec finds wrong; where the bytes
are no single map of msgpack, its own bounded reader finds out what they are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import msgpack
from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from configs.errors import RecordError

from .episode import SCHEMA

MAX_NUMBER = 2**53 - 1  # ids and fences pass through Lua, whose numbers are doubles
MAX_FAULT_CHARS = 300  # of msgspec's text, which quotes whole values

Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "environment"]

_Schema = Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
_Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_Name = Annotated[str, Meta(max_length=256)]
_Text = Annotated[str, Meta(max_length=65536)]
_Real = (
    float | int
)  # as floats alone, msgspec would take whole numbers for them; `rules.py` does not
# Small maps of 256 entries at most; they are for people, not for bulk.
_Reals = Annotated[dict[_Name, _Real], Meta(max_length=256)]
_Texts = Annotated[dict[_Name, _Text], Meta(max_length=256)]


class CompletionFields(Struct, forbid_unknown_fields=True):
    """A completion, or a chunk of one, on the wire."""

    schema: _Schema
    tokens: memoryview
    logprobs: memoryview
    mask: memoryview
    versions: list[tuple[_Number, _Number, _Number]]
    """Lineage, step, first token."""
    fences: list[tuple[_Number, _Name, _Number]]
    """Fence, incarnation, first token."""


class EpisodeFields(Struct, forbid_unknown_fields=True):
    """An episode on the wire."""

    schema: _Schema
    task_id: _Number
    group_id: _Number
    purpose: Purpose
    prompt: memoryview
    completion: CompletionFields
    reward: _Real
    parts: _Reals
    finish: FinishReason
    metrics: _Reals
    inc: _Name
    started: _Real
    finished: _Real
    text: _Texts


Fields = TypeVar("Fields", EpisodeFields, CompletionFields)

EPISODE, COMPLETION = Decoder(EpisodeFields), Decoder(CompletionFields)
_ENCODER = Encoder()


def write(fields: EpisodeFields | CompletionFields) -> bytes:
    """Turn fields into bytes; only `read` looks at what they are.

    Raises:
        RecordError: a value has no form in msgpack.
    """
    try:
        return _ENCODER.encode(fields)
    except UnicodeEncodeError as error:
        raise RecordError(f"texts of a record must be valid Unicode; {error.reason}") from error
    except (TypeError, OverflowError) as error:
        raise RecordError(f"a record must be of plain numbers and texts; {error}") from error


def read(decoder: Decoder[Fields], record: bytes) -> Fields:
    """Read bytes that are one map of this schema.

    Raises:
        RecordError: they are not; names what is wrong.
    """
    try:
        return decoder.decode(record)
    except (MsgspecError, ValueError, RecursionError) as error:  # UnicodeDecodeError: a ValueError
        raise _refusal(record, error) from error


def read_several(decoder: Decoder[Fields], record: bytes) -> list[Fields]:
    """Read one map or several in a row; raises as `read` does."""
    try:
        return [decoder.decode(record)]
    except (MsgspecError, ValueError, RecursionError):
        ends = [0, *(end for _, end in _values(record))]
    return [read(decoder, record[start:end]) for start, end in pairwise(ends)]


def _refusal(record: bytes, error: Exception) -> RecordError:
    values = [value for value, _ in _values(record)]
    if len(values) != 1:
        return RecordError(f"a record must be one msgpack map, got {len(values)}; it is refused")
    schema = values[0].get("schema", SCHEMA) if isinstance(values[0], dict) else SCHEMA
    if type(schema) is not int or schema != SCHEMA:
        return RecordError(f"schema must be {SCHEMA}, got {schema!r:.40}; update the older peer")
    fault = str(error)
    if len(fault) > MAX_FAULT_CHARS:
        fault = f"{fault[: MAX_FAULT_CHARS // 2]} ... {fault[-MAX_FAULT_CHARS // 2 :]}"
    return RecordError(f"a record must be a map of the fields of schema {SCHEMA}; {fault}")


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
