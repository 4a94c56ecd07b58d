"""Building blocks of messages: structs that msgspec turns into msgpack and back, within limits.

A `WireMessage` travels as a map of its fields with its `op`; a `MessagePart` within it is an array
of its fields in order, because heartbeats carry many of them. Reading refuses a value of another
type (a whole number counts as a float), an unknown field, a missing field without a default, a
float that is not finite, and a list or text beyond its limit. Writing checks nothing, as the type
checker does.
"""

from __future__ import annotations

import sys
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

MAX_TEXT = 65_536
"""Characters of one string: names, hashes and reasons, never tokens."""
MAX_ITEMS = 65_536
"""Entries of one list: a manifest of a large mixture of experts has about 20 000 tensors. A few
bytes on the wire can be a hundred in memory as a struct, so the entries are bounded too."""

MAX_BROKERS = 32
"""Brokers whose addresses are sent to actors; a fleet of thousands needs a few."""

Item = TypeVar("Item")

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Real = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A finite float: the bounds also exclude NaN."""
Many = Annotated[tuple[Item, ...], Meta(max_length=MAX_ITEMS)]
Endpoints = Annotated[tuple[Text, ...], Meta(max_length=MAX_BROKERS)]
Named = Annotated[dict[Text, Item], Meta(max_length=MAX_ITEMS)]


class WireMessage(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    """The content of one ZeroMQ frame, beside its header (`codec.py`)."""


class MessagePart(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A struct inside a message."""
