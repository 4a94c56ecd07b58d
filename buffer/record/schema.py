"""Wire form of records: fields, their types and bounds.

A record is one msgpack map; arrays travel as raw little-endian bytes, never as lists or pickle.
`rules.py` has what a schema cannot state, `faults.py` the words of a refusal.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .episode import SCHEMA

MAX_NUMBER = 2**53 - 1  # ids and fences pass through Lua, whose numbers are doubles
MAX_NAME_CHARS = 100  # of a reward's part or a metric: it is a key of metrics.jsonl
MAX_INCARNATION_CHARS = 200
MAX_TEXT_CHARS = 65536  # the answer of an item may be long
MAX_ENTRIES = 64  # of each small map; they are for people, not for bulk

Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "environment"]

_Schema = Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
_Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Incarnation = Annotated[str, Meta(max_length=MAX_INCARNATION_CHARS)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Real = (
    float | int
)  # as floats alone, msgspec would take whole numbers for them; `rules.py` does not
_Reals = Annotated[dict[_Name, _Real], Meta(max_length=MAX_ENTRIES)]
_Texts = Annotated[dict[_Name, _Text], Meta(max_length=MAX_ENTRIES)]


class CompletionFields(Struct, forbid_unknown_fields=True):
    """A completion, or a chunk of one, on the wire."""

    schema: _Schema
    tokens: memoryview
    logprobs: memoryview
    mask: memoryview
    versions: list[tuple[_Number, _Number, _Number]]
    """Lineage, step, first token."""
    fences: list[tuple[_Number, _Incarnation, _Number]]
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
    inc: _Incarnation
    started: _Real
    finished: _Real
    text: _Texts
