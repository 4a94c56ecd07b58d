"""Records to msgpack and back, by msgspec, with refusals that name the field.

msgspec turns an enum, a UUID, a date or a Decimal into text, and a dataclass into a map. A record
must come back as it was written, so `write` refuses such values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgpack
from msgspec import Meta, MsgspecError, Struct, ValidationError, convert
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import asdict
from msgspec.structs import fields as fields_of

from configs.errors import RecordError, quoted

from .episode import (
    MAX_ATTACHMENTS,
    MAX_MESSAGES,
    OLDEST_SCHEMA,
    SCHEMA,
    Attachment,
    Branch,
    Message,
    TurnReward,
)

# --------------------------------------------------------------------------------------------------
# Wire form of records: fields, their types and bounds.
#
# A record is one msgpack map; arrays travel as raw little-endian bytes, never as lists or pickle.
# Optional fields have their default where they are left out, and take no byte then. `rules.py` has
# what a schema cannot state.

MAX_NUMBER = 2**53 - 1  # ids and fences pass through Lua, whose numbers are doubles
MAX_NAME_CHARS = 100  # of a reward's part or a metric: it is a key of metrics.jsonl
MAX_INCARNATION_CHARS = 200
MAX_TEXT_CHARS = 65536  # the answer of an item may be long
MAX_ENTRIES = 64  # of each small map; they are for people, not for bulk

Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "environment"]

_Schema = Annotated[int, Meta(ge=OLDEST_SCHEMA, le=SCHEMA)]
_Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Incarnation = Annotated[str, Meta(max_length=MAX_INCARNATION_CHARS)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Real = float | int  # msgspec would read whole numbers as floats, which `rules.py` refuses
_Reals = Annotated[dict[_Name, _Real], Meta(max_length=MAX_ENTRIES)]
_Texts = Annotated[dict[_Name, _Text], Meta(max_length=MAX_ENTRIES)]
_Branches = tuple[Branch, ...]
_Attachments = Annotated[tuple[Attachment, ...], Meta(max_length=MAX_ATTACHMENTS)]
_TurnRewards = Annotated[tuple[TurnReward, ...], Meta(max_length=MAX_MESSAGES)]
_Messages = Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]


class CompletionExtras(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The optional fields of a completion on the wire, in a map of their own.

    A record without them is read and checked as quickly as if there were none, and its map has the
    short header of at most 15 fields.
    """

    experts: memoryview | None = None
    support_sizes: memoryview | None = None
    support_ids: memoryview | None = None
    teacher_logprobs: memoryview | None = None
    attachments: _Attachments = ()


class CompletionFields(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A completion, or a chunk of one, on the wire."""

    schema: _Schema
    tokens: memoryview
    logprobs: memoryview
    mask: memoryview
    versions: list[tuple[_Number, _Number, _Number]]
    """Lineage, step and first token of each span."""
    fences: list[tuple[_Number, _Incarnation, _Number]]
    """Fence, incarnation and first token of each run."""
    branches: _Branches = ()
    extras: CompletionExtras | None = None


class EpisodeExtras(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The optional fields of an episode on the wire, as those of a completion."""

    prompt_experts: memoryview | None = None
    prompt_attachments: _Attachments = ()
    turn_rewards: _TurnRewards = ()
    messages: _Messages = ()


class EpisodeFields(Struct, forbid_unknown_fields=True, omit_defaults=True):
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
    inc: _Incarnation
    started: _Real
    finished: _Real
    text: _Texts
    extras: EpisodeExtras | None = None


# --------------------------------------------------------------------------------------------------
# Texts of refusals: the field at fault, its rule, and its value.
#
# The schema finds quickly that a record is wrong. Only then its fields are checked here, one by
# one. Texts have the names of `Episode`, not the shorter ones of the wire.

MAX_QUOTED_CHARS = 80

Check = Callable[[str, object], None]
"""Raises a RecordError for a value that the field of this name cannot have."""


def refusal(fields: object, kind: type[Struct], fault: object) -> RecordError:
    """Return the error that names the first wrong field.

    Args:
        fields: The record as read or to be written: a map, or any other value.
        kind: The expected type, `EpisodeFields` or `CompletionFields`.
        fault: The fault, for one that a check of single fields does not find.
    """
    try:
        _check_map("a record", fields, _EPISODE if kind is EpisodeFields else _COMPLETION)
    except RecordError as refused:
        return refused
    return RecordError(f"a record must be a map of the fields of schema {SCHEMA}; {fault!s:.300}")


def _check_map(name: str, value: object, checks: dict[str, tuple[str, Check]]) -> None:
    fields = asdict(value) if isinstance(value, Struct) else value
    required = {key: label for key, (label, _) in checks.items() if key not in _OPTIONAL}
    names = ", ".join(required.values() or checks)
    if not isinstance(fields, dict):
        raise RecordError(
            f"{name} must be a map with {names}, got {quoted(fields)}, which is no map"
        )
    _check_schema("schema", fields.get("schema", SCHEMA))
    if missing := [label for key, label in required.items() if key not in fields]:
        raise RecordError(f"{name} must be a map with {names}, got one without {quoted(missing)}")
    if extra := [key for key in fields if key not in checks]:
        raise RecordError(f"{name} must be a map with {names}, got also {quoted(extra)}")
    for key, (label, check) in checks.items():
        if key in required or fields.get(key, _OPTIONAL[key]) != _OPTIONAL[key]:
            check(label, fields[key])


def _check_schema(_: str, value: object) -> None:
    if type(value) is not int or not OLDEST_SCHEMA <= value <= SCHEMA:
        raise RecordError(
            f"schema must be {OLDEST_SCHEMA} to {SCHEMA}, got {quoted(value)}; update the older "
            "peer"
        )


def _check_number(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise RecordError(f"{name} must be an integer from 0 to {MAX_NUMBER}, got {quoted(value)}")


def _check_real(name: str, value: object) -> None:
    if type(value) is not float or not math.isfinite(value):
        raise RecordError(f"{name:.{MAX_QUOTED_CHARS}} must be a finite float, got {quoted(value)}")


def _check_bytes(name: str, value: object) -> None:
    if not isinstance(value, bytes | memoryview):
        raise RecordError(f"{name} must be bytes, got {quoted(value)}")


def _one_of(*allowed: str) -> Check:
    def check(name: str, value: object) -> None:
        if type(value) is not str or value not in allowed:
            raise RecordError(f"{name} must be one of {', '.join(allowed)}, got {quoted(value)}")

    return check


def _text_of(max_chars: int) -> Check:
    def check(name: str, value: object) -> None:
        name = f"{name:.{MAX_QUOTED_CHARS}}"
        if type(value) is not str or len(value) > max_chars:
            shown = f"{len(value)}; shorten it" if type(value) is str else quoted(value)
            raise RecordError(f"{name} must be text of at most {max_chars} characters, got {shown}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RecordError(
                f"{name} must be valid Unicode, got {quoted(value)}; leave out halves of surrogate "
                "pairs"
            ) from None

    return check


def _name_of(max_chars: int) -> Check:
    check_text = _text_of(max_chars)

    def check(name: str, value: object) -> None:
        check_text(name, value)
        if not str(value).isprintable():
            raise RecordError(
                f"{name} must be printable characters, got {quoted(value)}; leave out line breaks "
                "and control characters"
            )

    return check


_check_name, _check_incarnation = _name_of(MAX_NAME_CHARS), _name_of(MAX_INCARNATION_CHARS)


def _entries_of(check_value: Check) -> Check:
    def check(name: str, entries: object) -> None:
        if type(entries) is not dict or len(entries) > MAX_ENTRIES:
            shown = f"{len(entries)}; leave some out" if type(entries) is dict else quoted(entries)
            raise RecordError(f"{name} must be a map of at most {MAX_ENTRIES} entries, got {shown}")
        for key, value in entries.items():
            _check_name(f"key of {name}", key)
            check_value(f"{name}.{key}", value)

    return check


def _triples_of(**checks: Check) -> Check:
    def check(name: str, rows: object) -> None:
        if type(rows) is not list or any(
            type(row) not in (list, tuple) or len(row) != len(checks) for row in rows
        ):
            raise RecordError(f"{name} must be a list of triples, got {quoted(rows)}")
        for row in rows:
            for (part, check_part), value in zip(checks.items(), row, strict=True):
                check_part(f"{name}.{part}", value)

    return check


def _form_of(form: Any, words: str) -> Check:
    """Check an optional field by its form in the schema, whose refusal names the part at fault."""

    def check(name: str, value: object) -> None:
        try:
            convert(value, form)
        except ValidationError as error:
            raise RecordError(f"{name} must be {words}, got {error!s:.200}") from error

    return check


_check_attachments = _form_of(
    _Attachments, f"at most {MAX_ATTACHMENTS} attachments (start, kind, SHA-256)"
)

_OPTIONAL: dict[str, object] = {
    field.name: field.default
    for kind in (CompletionFields, CompletionExtras, EpisodeFields, EpisodeExtras)
    for field in fields_of(kind)
    if not field.required
}
"""Fields that may be left out, by name, and what stands for them then."""

# By the wire's names: the field's name in `Episode`, and its check.
_COMPLETION_EXTRAS: dict[str, tuple[str, Check]] = {
    "experts": ("experts", _check_bytes),
    "support_sizes": ("support_sizes", _check_bytes),
    "support_ids": ("support_ids", _check_bytes),
    "teacher_logprobs": ("teacher_logprobs", _check_bytes),
    "attachments": ("attachments", _check_attachments),
}
_COMPLETION: dict[str, tuple[str, Check]] = {
    "schema": ("schema", _check_schema),
    "tokens": ("token_ids", _check_bytes),
    "logprobs": ("behaviour_logprobs", _check_bytes),
    "mask": ("loss_mask", _check_bytes),
    "versions": (
        "versions",
        _triples_of(lineage=_check_number, step=_check_number, start=_check_number),
    ),
    "fences": (
        "fences",
        _triples_of(fence=_check_number, incarnation=_check_incarnation, start=_check_number),
    ),
    "branches": (
        "branches",
        _form_of(_Branches, "branches (start, parent)"),
    ),
    "extras": ("extras", lambda name, value: _check_map(name, value, _COMPLETION_EXTRAS)),
}
_EPISODE_EXTRAS: dict[str, tuple[str, Check]] = {
    "prompt_experts": ("prompt_experts", _check_bytes),
    "prompt_attachments": ("prompt_attachments", _check_attachments),
    "turn_rewards": (
        "turn_rewards",
        _form_of(_TurnRewards, f"at most {MAX_MESSAGES} rewards (start, end, reward)"),
    ),
    "messages": ("messages", _form_of(_Messages, f"at most {MAX_MESSAGES} messages")),
}
_EPISODE: dict[str, tuple[str, Check]] = {
    "schema": ("schema", _check_schema),
    "task_id": ("task_id", _check_number),
    "group_id": ("group_id", _check_number),
    "purpose": ("purpose", _one_of(*get_args(Purpose))),
    "prompt": ("prompt_ids", _check_bytes),
    "completion": ("completion", lambda name, value: _check_map(name, value, _COMPLETION)),
    "reward": ("reward", _check_real),
    "parts": ("reward_parts", _entries_of(_check_real)),
    "finish": ("finish_reason", _one_of(*get_args(FinishReason))),
    "metrics": ("environment_metrics", _entries_of(_check_real)),
    "inc": ("incarnation", _check_incarnation),
    "started": ("started_at", _check_real),
    "finished": ("finished_at", _check_real),
    "text": ("metadata", _entries_of(_text_of(MAX_TEXT_CHARS))),
    "extras": ("extras", lambda name, value: _check_map(name, value, _EPISODE_EXTRAS)),
}


# --------------------------------------------------------------------------------------------------
# Records to msgpack and back, by msgspec, with refusals that name the field.

Fields = TypeVar("Fields", EpisodeFields, CompletionFields)

EPISODE, COMPLETION = Decoder(EpisodeFields), Decoder(CompletionFields)
_ENCODER = Encoder()
_UNREADABLE = MsgspecError, ValueError, RecursionError  # UnicodeDecodeError: a ValueError


def write(fields: EpisodeFields | CompletionFields) -> bytes:
    """Turn fields of plain numbers and texts into bytes; `read` finds all other faults.

    Raises:
        RecordError: A value is of another type, or has no form in msgpack; the text names its
            field.
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
        RecordError: The bytes are no such map; the text names the fault.
    """
    try:
        return decoder.decode(record)
    except _UNREADABLE as error:
        values = _msgpack_values(record)
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
        values: list[tuple[object, int]] = _msgpack_values(record)
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
            raise TypeError("a text has the wrong type")
    times = fields.started, fields.finished
    for real in (fields.reward, *times, *parts.values(), *metrics.values()):
        if type(real) is not float:
            raise TypeError("a number has the wrong type")
    if not type(fields.task_id) is type(fields.group_id) is int or type(text) is not dict:
        raise TypeError("a field has the wrong type")
    if (extras := fields.extras) is not None:
        _check_plain((extras.prompt_attachments, extras.turn_rewards, extras.messages))


def _check_plain_completion(fields: CompletionFields) -> None:
    for lineage, step, start in fields.versions:
        if not type(lineage) is type(step) is type(start) is int:
            raise TypeError("versions have the wrong type")
    for fence, incarnation, start in fields.fences:
        if not type(fence) is type(start) is int or type(incarnation) is not str:
            raise TypeError("fences have the wrong type")
    if fields.branches or fields.extras is not None:
        attachments = () if fields.extras is None else fields.extras.attachments
        _check_plain((fields.branches, attachments))


def _check_plain(value: object) -> None:
    if isinstance(value, tuple):
        for part in value:
            _check_plain(part)
    elif type(value) not in (int, float, str, type(None)):
        raise TypeError("a field has the wrong type")


def _msgpack_values(record: bytes) -> list[tuple[object, int]]:
    """Return all msgpack values with their ends; bytes that do not parse to the end are refused."""
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
