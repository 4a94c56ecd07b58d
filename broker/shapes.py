"""How a Python type looks on the wire: checked conversions, compiled once from the annotation.

Supports what messages are made of: int (64 bit), float (finite), bool, str, bytes, StrEnum,
`X | None`, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`, NamedTuples and dataclasses, and any of
these as `Annotated[X, KEPT]`. Everything else is an assertion at import time, so an unsupported
field cannot reach a socket.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter

from configs.errors import RecordError

from . import packing
from .packing import MAX_ITEMS

MAX_TEXT = 65_536
"""Characters of one string: names, hashes and reasons, never tokens."""

KEPT_VALUES = 4
"""Of each field that is `KEPT`, in memory."""
KEPT = object()
"""Marks a field, by `Annotated`, that is the same in message after message: its value travels
packed, and only what is new is packed or unpacked."""

Conversion = Callable[[object], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """Both conversions of one type; each raises `RecordError` on a value that is not of it."""

    pack: Conversion
    """Python value -> what msgpack writes."""
    unpack: Conversion
    """What msgpack read -> Python value."""


def shape_of(kind: object, where: str) -> Shape:
    """Compile the conversions of a type.

    Args:
        kind: The annotation, with names resolved.
        where: Path of the value for error texts, such as `submit.submissions`.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (some,) = (a for a in arguments if a is not types.NoneType)
        return _optional(shape_of(some, where))
    if origin is typing.Annotated:
        assert arguments[1:] == (KEPT,), f"{where} has an unknown mark"
        return _kept(shape_of(arguments[0], where), where)
    if origin is tuple and arguments[-1] is Ellipsis:
        return _repeated(shape_of(arguments[0], where), where)
    if origin is tuple:
        return _fixed([shape_of(a, where) for a in arguments], tuple, where)
    if origin is dict:
        assert arguments[0] is str, f"{where}: keys of a map must be strings"
        return _mapping(shape_of(arguments[1], where), where)
    assert isinstance(kind, type), f"{where} has no form on the wire: {kind!r}"
    if dataclasses.is_dataclass(kind):
        return _struct(kind, where)
    if issubclass(kind, tuple):
        hints = typing.get_type_hints(kind)
        return _fixed([shape_of(t, f"{where}.{n}") for n, t in hints.items()], kind, where)
    if issubclass(kind, StrEnum):
        return _enum(kind, where)
    scalar = _SCALARS[kind](where)
    return scalar


def struct_fields(kind: type) -> tuple[tuple[str, Shape], ...]:
    """Return the fields of a dataclass, in order, with their conversions."""
    assert dataclasses.is_dataclass(kind), f"{kind.__name__} must be a dataclass"
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(
        (f.name, shape_of(hints[f.name], f"{kind.__name__}.{f.name}"))
        for f in dataclasses.fields(kind)
    )


def text_shape(where: str) -> Shape:
    """Return the conversions of a bounded string."""

    def check(value: object) -> object:
        if type(value) is str and len(value) <= MAX_TEXT and (value.isascii() or _is_utf8(value)):
            return value
        raise _wrong(where, f"a string of at most {MAX_TEXT} characters", value)

    return Shape(check, check)


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _wrong(where: str, constraint: str, value: object) -> RecordError:
    shown = repr(value) if isinstance(value, int | float | bool) else type(value).__name__
    return RecordError(f"{where} must be {constraint}, got {shown:.40}")


def _whole(where: str) -> Shape:
    def check(value: object) -> object:
        if type(value) is int and -(2**63) <= value < 2**63:
            return value
        raise _wrong(where, "an integer of 64 bits", value)

    return Shape(check, check)


def _real(where: str) -> Shape:
    def pack(value: object) -> object:
        if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value):
            return float(value)
        raise _wrong(where, "a finite number", value)

    def unpack(value: object) -> object:
        if type(value) is float and math.isfinite(value):
            return value
        raise _wrong(where, "a finite float", value)

    return Shape(pack, unpack)


def _flag(where: str) -> Shape:
    def check(value: object) -> object:
        if type(value) is bool:
            return value
        raise _wrong(where, "true or false", value)

    return Shape(check, check)


def _binary(where: str) -> Shape:
    def check(value: object) -> object:
        if type(value) is bytes:
            return value
        raise _wrong(where, "bytes", value)

    return Shape(check, check)


def _enum(kind: type[StrEnum], where: str) -> Shape:
    members = {member.value: member for member in kind}

    def pack(value: object) -> object:
        if isinstance(value, kind):
            return value.value
        raise _wrong(where, f"a {kind.__name__}", value)

    def unpack(value: object) -> object:
        member = members.get(value) if type(value) is str else None
        if member is None:
            raise _wrong(where, f"one of {', '.join(members)}", value)
        return member

    return Shape(pack, unpack)


def _optional(some: Shape) -> Shape:
    return Shape(
        lambda value: None if value is None else some.pack(value),
        lambda value: None if value is None else some.unpack(value),
    )


def _repeated(item: Shape, where: str) -> Shape:
    def pack(value: object) -> object:
        if type(value) is not tuple or len(value) > MAX_ITEMS:
            raise _wrong(where, f"a tuple of at most {MAX_ITEMS}", value)
        return [item.pack(entry) for entry in value]

    def unpack(value: object) -> object:
        if type(value) is not list:
            raise _wrong(where, "a list", value)
        return tuple([item.unpack(entry) for entry in value])

    return Shape(pack, unpack)


def _fixed(items: list[Shape], kind: type, where: str) -> Shape:
    """A plain tuple or a NamedTuple: a list of known length."""
    make = kind if kind is tuple else lambda values: kind(*values)
    packs, unpacks = [i.pack for i in items], [i.unpack for i in items]

    def pack(value: object) -> object:
        if not isinstance(value, kind) or len(value) != len(packs):  # type: ignore[arg-type]
            raise _wrong(where, f"a {kind.__name__} of {len(packs)}", value)
        return [p(entry) for p, entry in zip(packs, value, strict=True)]  # type: ignore[call-overload]

    def unpack(value: object) -> object:
        if type(value) is not list or len(value) != len(unpacks):
            raise _wrong(where, f"a list of {len(unpacks)}", value)
        return make([u(entry) for u, entry in zip(unpacks, value, strict=True)])

    return Shape(pack, unpack)


def _mapping(item: Shape, where: str) -> Shape:
    key = text_shape(where)

    def pack(value: object) -> object:
        if type(value) is not dict or len(value) > MAX_ITEMS:
            raise _wrong(where, f"a map of at most {MAX_ITEMS}", value)
        return {key.pack(name): item.pack(entry) for name, entry in value.items()}

    def unpack(value: object) -> object:
        if type(value) is not dict:
            raise _wrong(where, "a map", value)
        return {key.unpack(name): item.unpack(entry) for name, entry in value.items()}

    return Shape(pack, unpack)


def _kept(inner: Shape, where: str) -> Shape:
    packed: list[tuple[object, bytes]] = []  # with the value, so that its identity stays its own

    def pack(value: object) -> object:
        for known, frame in packed:
            if known is value:
                return frame
        frame = packing.pack(inner.pack(value))
        packed.append((value, frame))
        del packed[:-KEPT_VALUES]
        return frame

    @lru_cache(KEPT_VALUES)
    def unpack_once(frame: bytes) -> object:
        return inner.unpack(packing.unpack(frame, max_bytes=len(frame)))

    def unpack(value: object) -> object:
        if type(value) is not bytes:
            raise _wrong(where, "bytes", value)
        return unpack_once(value)

    return Shape(pack, unpack)


def _struct(kind: type, where: str) -> Shape:
    """A dataclass within a message: the list of its fields, in order."""
    fields = struct_fields(kind)
    assert len(fields) > 1, f"{kind.__name__}: attrgetter of one name returns no tuple"
    read = attrgetter(*(name for name, _ in fields))
    packs, unpacks = [s.pack for _, s in fields], [s.unpack for _, s in fields]

    def pack(value: object) -> object:
        if type(value) is not kind:
            raise _wrong(where, f"a {kind.__name__}", value)
        return [p(entry) for p, entry in zip(packs, read(value), strict=True)]

    def unpack(value: object) -> object:
        if type(value) is not list or len(value) != len(unpacks):
            raise _wrong(where, f"a list of the {len(unpacks)} fields of {kind.__name__}", value)
        return kind(*[u(entry) for u, entry in zip(unpacks, value, strict=True)])

    return Shape(pack, unpack)


_SCALARS: dict[type, Callable[[str], Shape]] = {
    int: _whole,
    float: _real,
    bool: _flag,
    str: text_shape,
    bytes: _binary,
}
