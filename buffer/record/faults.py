"""Words of a refusal: the field at fault, what it must be, and what it was.

The schema finds that a record is wrong and does so fast; only then are its fields looked at here,
one by one. Names are those of `Episode`, not the shorter ones of the wire.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import get_args

from msgspec import Struct
from msgspec.structs import asdict

from configs.errors import RecordError

from .episode import SCHEMA
from .schema import (
    MAX_ENTRIES,
    MAX_INCARNATION_CHARS,
    MAX_NAME_CHARS,
    MAX_NUMBER,
    MAX_TEXT_CHARS,
    EpisodeFields,
    FinishReason,
    Purpose,
)

MAX_QUOTED_CHARS = 80

Check = Callable[[str, object], None]
"""Raises a RecordError for a value that the field of this name cannot have."""

_brief = reprlib.Repr()
_brief.maxlevel = 2
_brief.maxstring = _brief.maxother = _brief.maxlong = MAX_QUOTED_CHARS


def refusal(fields: object, kind: type[Struct], fault: object) -> RecordError:
    """Name the first field that is wrong.

    Args:
        fields: The record as read or to be written: a map, or any other value.
        kind: What it should have been, `EpisodeFields` or `CompletionFields`.
        fault: What was found wrong, for a fault that no look at one field finds.
    """
    try:
        _check_map("a record", fields, _EPISODE if kind is EpisodeFields else _COMPLETION)
    except RecordError as refused:
        return refused
    return RecordError(f"a record must be a map of the fields of schema {SCHEMA}; {fault!s:.300}")


def quoted(value: object) -> str:
    """Return a value's repr, cut; never an error."""
    try:
        value = value[:MAX_QUOTED_CHARS] if isinstance(value, bytes) else value
        return f"{_brief.repr(value):.{MAX_QUOTED_CHARS}}"
    except (ValueError, RecursionError):  # of a number of thousands of digits, say
        return type(value).__name__


def _check_map(name: str, value: object, checks: dict[str, tuple[str, Check]]) -> None:
    fields = asdict(value) if isinstance(value, Struct) else value
    names = ", ".join(known for known, _ in checks.values())
    if not isinstance(fields, dict):
        raise RecordError(f"{name} must be a map of {names}, got {quoted(fields)}")
    _check_schema("schema", fields.get("schema", SCHEMA))
    if missing := [known for key, (known, _) in checks.items() if key not in fields]:
        raise RecordError(f"{name} must be a map of {names}, got one without {quoted(missing)}")
    if extra := [key for key in fields if key not in checks]:
        raise RecordError(f"{name} must be a map of {names}, got {quoted(extra)} besides")
    for key, (known, check) in checks.items():
        check(known, fields[key])


def _check_schema(_: str, value: object) -> None:
    if type(value) is not int or value != SCHEMA:
        raise RecordError(f"schema must be {SCHEMA}, got {quoted(value)}; update the older peer")


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
            shown = f"{len(value)} characters" if type(value) is str else quoted(value)
            raise RecordError(f"{name} must be text of at most {max_chars} characters, got {shown}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RecordError(f"{name} must be valid Unicode, got {quoted(value)}") from None

    return check


def _name_of(max_chars: int) -> Check:
    check_text = _text_of(max_chars)

    def check(name: str, value: object) -> None:
        check_text(name, value)
        if not str(value).isprintable():
            raise RecordError(f"{name} must be printable characters, got {quoted(value)}")

    return check


_check_name, _check_incarnation = _name_of(MAX_NAME_CHARS), _name_of(MAX_INCARNATION_CHARS)


def _entries_of(check_value: Check) -> Check:
    def check(name: str, entries: object) -> None:
        if type(entries) is not dict or len(entries) > MAX_ENTRIES:
            shown = len(entries) if type(entries) is dict else quoted(entries)
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


# By the wire's names: the field's name in `Episode`, and its check.
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
}
