"""Messages as a peer of the wire version before reads them.

What a version adds to a message is a field with a default, and the message has `omit_defaults`: a
reader of the version before refuses fields that it does not know, so it must not be sent them.
Whoever raises the wire version replaces these tables, after recording frames of the version before
(`tests/broker/support/recorded_frames.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import fields, replace

from configs.errors import RecordError

from .fields import Message
from .messages import Verdicts, Welcome
from .weight_messages import Announce, Brokers, Join, Moved, Neighbours

ADDED_IN = 5
ADDED_FIELDS: Mapping[type[Message], tuple[str, ...]] = {
    Welcome: ("brokers",),
    Verdicts: ("brokers",),
    Join: ("site",),
    Announce: ("update_digests",),
    Moved: ("update_digests",),
}
ADDED_MESSAGES: tuple[type[Message], ...] = (Brokers, Neighbours)


def is_known_to(version: int, message: object) -> bool:
    """Return whether a served wire version has a message of this kind."""
    return version >= ADDED_IN or not isinstance(message, ADDED_MESSAGES)


def as_known_to(version: int, message: Message) -> Message:
    """Return a message without what this earlier wire version does not have.

    Raises:
        RecordError: It has no such message.
    """
    if not is_known_to(version, message):
        raise RecordError(f"wire version {version} must have {type(message).__name__}, but has not")
    added = ADDED_FIELDS.get(type(message), ())
    if not added:
        return message
    defaults = {each.name: each.default for each in fields(message) if each.name in added}
    return replace(message, **defaults)
