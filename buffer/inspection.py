"""Whether the records of a message are valid: what `decode_episode` says of each, but cheaper.

A broker looks at every episode of the fleet and keeps none. So no episode is made here, and the
numbers of all records are looked at together: a call of numpy costs more than the look at a
completion. Only says yes: whatever is not plainly valid goes to `decode_episode`, which names what
is wrong, or knows better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from .codec import COMPLETION_FIELDS, EPISODE_FIELDS, decode_episode
from .episode import SCHEMA
from .validity import (
    FINISH_REASONS,
    MAX_ENTRIES,
    MAX_LOGPROB,
    MAX_NAME_CHARS,
    MAX_NUMBER,
    MAX_TEXT_CHARS,
    MAX_TOKENS,
    PURPOSES,
)

_Map = dict[str, Any]


def task_ids_of(records: Sequence[bytes], *, max_bytes: int) -> list[int]:
    """Check episode records and return whose they are, in order.

    Raises:
        RecordError: what `decode_episode` finds wrong with the first that is not valid.
    """
    maps = [_plain_map(record) if len(record) <= max_bytes else None for record in records]
    plain = [fields for fields in maps if fields is not None]
    if not plain or not _are_valid_numbers(plain):
        return [decode_episode(record, max_bytes=max_bytes).task_id for record in records]
    return [
        decode_episode(record, max_bytes=max_bytes).task_id if fields is None else fields["task_id"]
        for record, fields in zip(records, maps, strict=True)
    ]


def _plain_map(record: bytes) -> _Map | None:
    """Return a record's fields if all is right but, perhaps, the numbers in its arrays."""
    try:
        fields = msgpack.unpackb(record, raw=False, strict_map_key=True)
    except (msgpack.UnpackException, ValueError, OverflowError):
        return None
    is_plain = (
        type(fields) is dict
        and fields.keys() == EPISODE_FIELDS
        and _is_schema(fields["schema"])
        and _is_number(fields["task_id"])
        and _is_number(fields["group_id"])
        and fields["purpose"] in PURPOSES
        and fields["finish"] in FINISH_REASONS
        and _is_array(fields["prompt"])
        and _is_completion(fields["completion"])
        and _is_real(fields["reward"])
        and _is_real(fields["started"])
        and _is_real(fields["finished"])
        and _is_name(fields["inc"])
        and _is_map(fields["parts"], _is_real)
        and _is_map(fields["metrics"], _is_real)
        and _is_map(fields["text"], _is_short_text)
    )
    return fields if is_plain else None


def _is_completion(fields: object) -> bool:
    if type(fields) is not dict or fields.keys() != COMPLETION_FIELDS:
        return False
    tokens, logprobs, mask = fields["tokens"], fields["logprobs"], fields["mask"]
    return (
        _is_schema(fields["schema"])
        and _is_array(tokens)
        and type(logprobs) is bytes
        and type(mask) is bytes
        and len(tokens) == len(logprobs) == 4 * len(mask)
        and _cover(fields["versions"], len(mask), _is_number)
        and all(_is_number(row[0]) for row in fields["versions"])
        and _cover(fields["fences"], len(mask), _is_name)
        and _ascend([row[0] for row in fields["fences"]])
    )


def _cover(rows: object, length: int, is_second: Any) -> bool:
    """Whether these are triples whose last numbers ascend from 0 and stay below `length`."""
    if type(rows) is not list or not rows:
        return False
    before = -1
    for row in rows:
        if type(row) is not list or len(row) != 3 or not is_second(row[1]):
            return False
        start = row[2]
        if type(start) is not int or not before < start < length:
            return False
        before = start
    return bool(rows[0][2] == 0)


def _ascend(fences: list[object]) -> bool:
    return all(map(_is_number, fences)) and fences == sorted(fences)  # type: ignore[type-var]


def _are_valid_numbers(maps: list[_Map]) -> bool:
    completions = [fields["completion"] for fields in maps]
    ids = [fields["prompt"] for fields in maps] + [c["tokens"] for c in completions]
    if np.frombuffer(b"".join(ids), "<i4").min() < 0:
        return False
    logprobs = np.frombuffer(b"".join([c["logprobs"] for c in completions]), "<f4")
    # The least of values with a NaN is NaN, of which no comparison holds.
    if not (logprobs.min() > -math.inf and logprobs.max() <= MAX_LOGPROB):
        return False
    mask = b"".join([c["mask"] for c in completions])
    sampled = mask.count(1)
    if sampled == len(mask):
        return True
    is_sampled = np.frombuffer(mask, np.bool_)
    return sampled + mask.count(0) == len(mask) and not logprobs[~is_sampled].any()


def _is_schema(value: object) -> bool:
    return type(value) is int and value == SCHEMA


def _is_array(value: object) -> bool:
    """Whether these are the bytes of some 32-bit values."""
    return type(value) is bytes and 0 < len(value) <= 4 * MAX_TOKENS and len(value) % 4 == 0


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


def _is_real(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_name(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_NAME_CHARS


def _is_short_text(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT_CHARS


def _is_map(entries: object, is_value: Any) -> bool:
    if type(entries) is not dict or len(entries) > MAX_ENTRIES:
        return False
    return all(map(_is_name, entries)) and all(map(is_value, entries.values()))
