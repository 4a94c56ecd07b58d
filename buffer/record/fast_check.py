"""Whether the records of a message are valid: what the codec says of each, but cheaper.

A broker looks at every episode of the fleet and keeps none. So no episode is made here, nothing is
copied, and the numbers of all records are looked at together: a call of numpy costs more than the
look at a completion. Only says yes: whatever is not plainly valid goes to `codec.py`, which names
what is wrong, or knows better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Literal, TypeVar

import numpy as np
from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder

from .codec import decode_completion, decode_episode
from .episode import SCHEMA
from .rules import MAX_ENTRIES, MAX_LOGPROB, MAX_NAME_CHARS, MAX_NUMBER, MAX_TEXT_CHARS, MAX_TOKENS

_Schema = Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
_Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Real = float | int  # told apart below: where only floats may be, msgspec takes whole numbers too
_Reals = Annotated[dict[_Name, _Real], Meta(max_length=MAX_ENTRIES)]


class _Completion(Struct, forbid_unknown_fields=True):
    schema: _Schema
    tokens: memoryview
    logprobs: memoryview
    mask: memoryview
    versions: list[tuple[_Number, _Number, int]]
    fences: list[tuple[_Number, _Name, int]]


class _Episode(Struct, forbid_unknown_fields=True):
    schema: _Schema
    task_id: _Number
    group_id: _Number
    purpose: Literal["train", "eval"]
    prompt: memoryview
    completion: _Completion
    reward: _Real
    parts: _Reals
    finish: Literal["stop", "length", "environment"]
    metrics: _Reals
    inc: _Name
    started: _Real
    finished: _Real
    text: Annotated[dict[_Name, _Text], Meta(max_length=MAX_ENTRIES)]


_least, _most = np.minimum.reduce, np.maximum.reduce  # the methods cost three times as much
_EPISODES, _COMPLETIONS = Decoder(_Episode), Decoder(_Completion)
_Plain = TypeVar("_Plain", _Episode, _Completion)


def task_ids_of(records: Sequence[bytes], *, max_bytes: int) -> list[int]:
    """Check episode records and return whose they are, in order.

    Raises:
        RecordError: what `decode_episode` finds wrong with the first that is not valid.
    """
    found = [_read(record, _EPISODES, _is_plain_episode, max_bytes) for record in records]
    episodes = [episode for episode in found if episode is not None]
    completions = [episode.completion for episode in episodes]
    if not _are_valid_numbers([episode.prompt for episode in episodes], completions):
        found = [None] * len(records)
    return [
        decode_episode(record, max_bytes=max_bytes).task_id if episode is None else episode.task_id
        for record, episode in zip(records, found, strict=True)
    ]


def lengths_of(chunks: Sequence[bytes], *, max_bytes: int) -> list[int]:
    """Check chunks of completions and return how many tokens each has, in order.

    Raises:
        RecordError: what `decode_completion` finds wrong with the first that is not valid.
    """
    found = [_read(chunk, _COMPLETIONS, _is_plain_completion, max_bytes) for chunk in chunks]
    if not _are_valid_numbers([], [completion for completion in found if completion is not None]):
        found = [None] * len(chunks)
    return [
        decode_completion(chunk, max_bytes=max_bytes).token_ids.size
        if completion is None
        else len(completion.mask)
        for chunk, completion in zip(chunks, found, strict=True)
    ]


def _read(
    record: bytes, decoder: Decoder[_Plain], is_plain: Callable[[_Plain], bool], max_bytes: int
) -> _Plain | None:
    """Return a record's fields if all is right but, perhaps, the numbers in its arrays."""
    if len(record) > max_bytes:
        return None
    try:
        fields = decoder.decode(record)
    except (MsgspecError, ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
        return None
    return fields if is_plain(fields) else None


def _is_plain_episode(fields: _Episode) -> bool:
    return (
        _is_array(fields.prompt)
        and _is_plain_completion(fields.completion)
        and _is_real(fields.reward)
        and _is_real(fields.started)
        and _is_real(fields.finished)
        and all(map(_is_real, fields.parts.values()))
        and all(map(_is_real, fields.metrics.values()))
    )


def _is_plain_completion(fields: _Completion) -> bool:
    length = len(fields.mask)
    return (
        _is_array(fields.tokens)
        and len(fields.tokens) == len(fields.logprobs) == 4 * length
        and _cover(fields.versions, length)
        and _cover(fields.fences, length)
        and (len(fields.fences) == 1 or fields.fences == sorted(fields.fences, key=itemgetter(0)))
    )


def _cover(rows: Sequence[tuple[int, int | str, int]], length: int) -> bool:
    """Whether the last of these triples ascend from 0 and stay below `length`."""
    if len(rows) == 1:
        return rows[0][2] == 0
    starts = [start for _, _, start in rows]
    ascend = all(a < b for a, b in pairwise(starts))
    return bool(starts) and starts[0] == 0 and ascend and starts[-1] < length


def _are_valid_numbers(prompts: list[memoryview], completions: list[_Completion]) -> bool:
    if not completions:
        return True
    ids = [*prompts, *(c.tokens for c in completions)]
    if _least(np.frombuffer(b"".join(ids), "<i4")) < 0:
        return False
    logprobs = np.frombuffer(b"".join([c.logprobs for c in completions]), "<f4")
    # The least of values with a NaN is NaN, of which no comparison holds.
    if not (_least(logprobs) > -math.inf and _most(logprobs) <= MAX_LOGPROB):
        return False
    mask = np.frombuffer(b"".join([c.mask for c in completions]), np.uint8)
    most = _most(mask)
    if _least(mask) == 1 == most:
        return True
    return bool(most <= 1) and not logprobs[mask == 0].any()


def _is_array(values: memoryview) -> bool:
    """Whether these are the bytes of some 32-bit values."""
    return 0 < len(values) <= 4 * MAX_TOKENS and len(values) % 4 == 0


def _is_real(value: object) -> bool:
    return type(value) is float and math.isfinite(value)
