"""Messages survive the wire, and nothing that arrives there raises anything but RecordError."""

from __future__ import annotations

import math
import tracemalloc
import typing
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.protocol.codec import (
    WIRE_VERSION,
    Envelope,
    decode,
    decode_spec,
    encode,
    encode_spec,
    header_of,
)
from broker.protocol.fields import WireMessage
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    LeaseReply,
    LeaseRequest,
    StatusReply,
    TaskSpec,
    Verdict,
)
from buffer.record.episode import PolicyVersion
from configs.errors import RecordError

MAX = 2**20
KINDS: tuple[type, ...] = typing.get_args(typing.get_type_hints(Envelope)["message"])
INTS = st.integers(-(2**63), 2**63 - 1)
STEPS = st.integers(-1, 2**53 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    float: FLOATS,
    bool: st.booleans(),
    str: TEXTS,
    bytes: st.binary(max_size=20),
    type(None): st.none(),
    Verdict: st.sampled_from(Verdict),
    PolicyVersion: st.builds(PolicyVersion, STEPS, STEPS),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation that messages use."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in LEAVES:
        return LEAVES[kind]
    if origin is typing.Annotated and arguments[0] is int:
        return st.integers(arguments[1].ge, arguments[1].le)
    if origin is typing.Annotated:
        return values(arguments[0])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(TEXTS, values(arguments[1]), max_size=3)
    if origin is not None:
        return st.one_of(*map(values, arguments))
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in msgspec.structs.fields(kind)]
    return st.builds(kind, **{name: values(hints[name]) for name in names})


any_message = st.sampled_from(KINDS).flatmap(values)


def pack(op: str = "bye", fields: dict[str, object] | None = None, **changes: object) -> bytes:
    message = {"op": op, **(fields or {})}
    header: dict[str, object] = {
        "v": WIRE_VERSION,
        "run": "r",
        "inc": "a",
        "seq": 1,
        "message": message,
    }
    packed = msgpack.packb({**header, **changes})
    assert isinstance(packed, bytes)
    return packed


def test_every_message_is_on_the_wire() -> None:
    assert set(KINDS) == set(WireMessage.__subclasses__())


def test_names_that_changed_in_python_are_on_the_wire_as_before() -> None:
    reply = StatusReply("RUNNING", 0, tasks={}, actors=(), refusals={}, run_snapshot=b"{}")
    frame = encode(reply, run="demo", incarnation="", seq=1)

    assert msgpack.unpackb(frame)["message"]["bulletin"] == b"{}"
    assert decode(frame, max_bytes=MAX).message == reply
    assert Verdict("STALE") is Verdict.OUTDATED


@pytest.mark.slow
@given(any_message, st.integers(0, 2**63 - 1))
@settings(max_examples=100, deadline=None)
def test_a_message_comes_back_as_it_was(message: object, seq: int) -> None:
    frame = encode(message, run="demo", incarnation="actor-1", seq=seq)
    envelope = decode(frame, max_bytes=MAX)

    assert envelope.message == message
    assert (envelope.run, envelope.inc, envelope.seq) == ("demo", "actor-1", seq)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_a_record_error(frame: bytes) -> None:
    with pytest.raises(RecordError):
        decode(frame, max_bytes=MAX)
    assert 0 <= header_of(frame).seq < 2**63


@pytest.mark.slow
@given(any_message, st.data())
@settings(max_examples=200, deadline=None)
def test_a_mutated_message_is_a_message_or_a_record_error(message: object, data: Any) -> None:
    frame = bytearray(encode(message, run="demo", incarnation="actor-1", seq=5))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1))
        frame[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not frame:
            break

    try:
        envelope = decode(bytes(frame), max_bytes=MAX)
    except RecordError:
        return
    again = encode(envelope.message, run=envelope.run, incarnation=envelope.inc, seq=envelope.seq)
    assert decode(again, max_bytes=MAX) == envelope


@given(
    any_message,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=8,
    ),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_field_of_any_other_shape_is_a_record_error_or_a_value(
    message: object, value: object, data: Any
) -> None:
    frame = msgpack.unpackb(encode(message, run="demo", incarnation="a", seq=5))
    part = frame["message"] if data.draw(st.booleans()) else frame
    part[data.draw(st.sampled_from(sorted(part)))] = value
    packed = msgpack.packb(frame)
    assert isinstance(packed, bytes)

    complaint = ""
    try:
        decode(packed, max_bytes=MAX)
    except RecordError as error:
        complaint = str(error)
    assert len(complaint) < 1000  # whatever came, the reply that quotes it stays small


LEASE = {"n": 1, "version": [1, 0]}
BEAT = {"beats": [], "version": [1, 0], "stats": {}}
REFUSED: list[tuple[bytes, str]] = [
    (pack(v=1), f"wire version must be {WIRE_VERSION}, got 1"),
    (pack(v=True), "Expected `int`, got `bool`"),
    (msgpack.packb({"v": 1, "run": "r", "inc": "a", "seq": 1, "op": "bye"}), "got 1; update"),
    (pack("eval"), "Invalid value 'eval'"),
    (pack(message={"op": ["bye"]}), "Expected `str`, got `array`"),
    (pack(message={}), "missing required field `op`"),
    (pack(extra=1), "unknown field `extra`"),
    (pack(fields={"extra": 1}), r"unknown field `extra` - at `\$.message`"),
    (pack("lease", {"n": 1}), r"missing required field `version` - at `\$.message`"),
    (pack("lease", LEASE | {"n": 2**63}), r"Expected `int` <= 9223372036854775807 - at .*n`"),
    (pack("lease", LEASE | {"n": True}), r"Expected `int`, got `bool` - at `\$.message.n`"),
    (pack("lease", LEASE | {"version": [-2, 0]}), "Expected `int` >= -1"),
    (pack("lease", LEASE | {"version": [1]}), "Expected `array` of length 2, got 1"),
    (pack("lease", LEASE | {"version": [[], []]}), "Expected `int`, got `array`"),
    (pack("beat", BEAT | {"stats": {"tokens": math.nan}}), "Expected `float` >= "),
    (pack("beat", BEAT | {"stats": {"tokens": math.inf}}), "Expected `float` <= "),
    (pack("beat", BEAT | {"beats": [[1]]}), "Expected `array` of at least length 2, got 1"),
    (
        pack("beat", BEAT | {"beats": [[0, 0, 0, 0, b"", 0]]}),
        "Expected `array` of at most length 5, got 6",
    ),
    (pack("beat", BEAT | {"beats": [[0, 0]] * 4097}), "Expected `array` of length <= 4096"),
    (pack(seq=-1), "Expected `int` >= 0"),
    (pack(run="r" * 70_000), "Expected `str` of length <= 65536"),
    (pack() + b"\x00", "trailing characters"),
    (pack()[:-1], "truncated"),
    (pack().replace(b"\xa1r", b"\xa1\xff"), "can't decode byte"),
    (b"\x91" * 5000, "got `array`"),
    (b"\x01", "got `int`"),
]


@pytest.mark.parametrize(("frame", "complaint"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_is_wrong_is_named(frame: bytes, complaint: str) -> None:
    with pytest.raises(RecordError, match=complaint):
        decode(frame, max_bytes=2**24)


@pytest.mark.parametrize("place", ["v", "run", "seq", "message", "extra"])
@pytest.mark.parametrize("filling", [b"\x90", b"\x80"])
def test_a_frame_that_is_huge_in_memory_is_refused_before_it_is_made(
    place: str, filling: bytes
) -> None:
    values = {b"v": b"\x02", b"run": b"\xa1r", b"inc": b"\xa1a", b"seq": b"\x01"}
    values[place.encode()] = b"\xdd" + (2**22).to_bytes(4, "big") + filling * 2**22
    names = [bytes([0xA0 + len(name)]) + name for name in values]
    frame = bytes([0x80 + len(values)]) + b"".join(map(bytes.__add__, names, values.values()))

    tracemalloc.start()
    with pytest.raises(RecordError):
        decode(frame, max_bytes=2**24)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 2 * len(frame)


def test_a_frame_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(RecordError, match="at most 5 bytes, got"):
        decode(pack(), max_bytes=5)


def test_what_msgpack_cannot_hold_does_not_leave() -> None:
    for message, complaint in [
        (LeaseRequest(n=2**70, version=PolicyVersion(1, 0)), "can't serialize ints"),
        (LeaseReply("\ud800", (), None), "surrogates not allowed"),
        (Verdict.OK, "must be a WireMessage, got Verdict"),
    ]:
        with pytest.raises(RecordError, match=complaint):
            encode(message, run="r", incarnation="a", seq=1)


def test_a_refused_frame_still_names_its_sequence() -> None:
    assert header_of(pack(v=9, seq=77)).seq == 77
    assert header_of(pack(v=9, seq="x")).seq == 0
    assert header_of(pack(v=9, seq=77)[:3]).seq == 0


def test_a_spec_comes_back_from_the_store_or_is_a_record_error() -> None:
    spec = TaskSpec(group_id=7, index=7, seed=2**62, purpose="train", temperature=0.7)

    assert decode_spec(encode_spec(spec)) == spec
    assert len(encode_spec(spec)) < 64
    for stored in (b"", b"\x95", encode(Bye(), run="r", incarnation="a", seq=1)):
        with pytest.raises(RecordError):
            decode_spec(stored)
    with pytest.raises(RecordError, match="purpose must be train or eval"):
        decode_spec(encode_spec(msgspec.structs.replace(spec, purpose="else")))


def test_a_heartbeat_of_a_full_actor_is_compact() -> None:
    beats = tuple(Beat(10**9 + i, 10**15 + i) for i in range(256))
    frame = encode(BeatRequest(beats, PolicyVersion(1, 5)), run="r", incarnation="a", seq=1)

    assert len(frame) < 256 * 24
