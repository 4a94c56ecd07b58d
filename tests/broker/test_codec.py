"""Messages survive the wire, and nothing that arrives there raises anything but RecordError."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import codec, messages
from broker.codec import decode, decode_spec, encode, encode_spec, sequence_of
from broker.manifest import Probe, TensorSpec, WeightManifest
from broker.messages import (
    Beat,
    BeatRequest,
    Bye,
    LeaseReply,
    LeaseRequest,
    TaskSpec,
    TaskVerdict,
    Verdict,
    Verdicts,
)
from buffer.episode import PolicyVersion
from configs.errors import RecordError

MAX = 2**20
KINDS: list[type] = [
    kind
    for kind in (*vars(messages).values(), WeightManifest)
    if isinstance(kind, type) and kind in codec._by_kind
]
INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation that messages use."""
    scalars = {int: INTS, float: FLOATS, str: TEXTS, bytes: st.binary(max_size=20)}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in scalars:
        return scalars[kind]
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(TEXTS, values(arguments[1]), max_size=3)
    if origin is not None:
        return st.one_of(*map(values, arguments))
    if kind is type(None):
        return st.none()
    if kind is Verdict:
        return st.sampled_from(Verdict)
    if kind is PolicyVersion:
        return st.builds(PolicyVersion, INTS, INTS)
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{f.name: values(hints[f.name]) for f in dataclasses.fields(kind)})


any_message = st.sampled_from(KINDS).flatmap(values)


def pack(**changes: object) -> bytes:
    fields: dict[str, object] = {"v": 1, "run": "r", "inc": "a", "seq": 1, "op": "bye"}
    packed = msgpack.packb({**fields, **changes})
    assert isinstance(packed, bytes)
    return packed


def test_all_messages_are_registered() -> None:
    assert len(KINDS) == 17


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
    assert 0 <= sequence_of(frame) < 2**63


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
    fields = msgpack.unpackb(encode(message, run="demo", incarnation="a", seq=5))
    name = data.draw(st.sampled_from(sorted(fields)))
    frame = msgpack.packb({**fields, name: value})
    assert isinstance(frame, bytes)

    complaint = ""
    try:
        decode(frame, max_bytes=MAX)
    except RecordError as error:
        complaint = str(error)
    assert len(complaint) < 1000  # whatever came, the reply that quotes it stays small


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (pack(v=2), "wire version must be 1, got 2"),
        (pack(v=True), "wire version must be 1, got True"),
        (pack(op="eval"), "operation must be a registered one, got 'eval'"),
        (pack(op=["bye"]), "must be a string"),
        (pack(extra=1), "bye must have exactly the fields"),
        (pack(op="lease", n=1), "lease must have exactly the fields"),
        (pack(op="lease", n=2**63, version=[1, 0]), "LeaseRequest.n must be an integer of 64 bits"),
        (pack(op="lease", n=True, version=[1, 0]), "LeaseRequest.n must be an integer"),
        (pack(op="lease", n=1, version=[1]), "LeaseRequest.version must be a list of 2"),
        (pack(op="beat", beats=[], version=[1, 0], stats={"x": math.nan}), "must be a finite"),
        (pack(op="beat", beats=[], version=[1, 0], stats={"x": 1}), "must be a finite"),
        (pack(op="beat", beats=[[1, 2, 3]], version=[1, 0], stats={}), "the 5 fields of Beat"),
        (pack(seq=-1), "seq must be an integer of 63 bits"),
        (pack(run="r" * 70_000), "must be a string of at most 65536"),
        (pack() + b"\x00", "one msgpack value"),
        (pack()[:-1], "one msgpack value"),
        (b"\x91" * 5000, "one msgpack value"),
        (b"\x01", "must be a map, got int"),
        (pack(op="lease", n=1, version=[[], []]), "must be an integer of 64 bits, got list"),
    ],
)
def test_what_is_wrong_is_named(frame: bytes, complaint: str) -> None:
    with pytest.raises(RecordError, match=complaint.replace("[", r"\[")):
        decode(frame, max_bytes=MAX)


def test_a_frame_that_is_huge_in_memory_is_refused() -> None:
    row = msgpack.packb([[]] * 60_000)
    assert isinstance(row, bytes)
    bomb = b"\xdc\x00\x14" + row * 20

    with pytest.raises(RecordError, match="at most 1048576 elements"):
        decode(bomb, max_bytes=2**24)
    with pytest.raises(RecordError, match="at most 1000 bytes, got"):
        decode(bomb, max_bytes=1000)


def _manifest(step: int, *names: str) -> WeightManifest:
    tensors = tuple(TensorSpec(name, "float32", (2, 3), 0, 24) for name in names)
    return WeightManifest(PolicyVersion(1, step), "d", "c", 24, tensors, Probe((1, 2), (-0.5,)))


def test_a_layout_that_stays_the_same_is_unpacked_once() -> None:
    def again(manifest: WeightManifest) -> WeightManifest:
        frame = encode(manifest, run="r", incarnation="a", seq=1)
        message = decode(frame, max_bytes=MAX).message
        assert isinstance(message, WeightManifest)
        return message

    first, other = again(_manifest(1, "a", "b")), again(_manifest(2, "a", "c"))
    second = again(_manifest(3, "a", "b"))

    assert second.tensors is first.tensors
    assert (second.version.step, other.tensors) == (3, _manifest(2, "a", "c").tensors)
    many = [_manifest(step, f"w{step}") for step in range(20)]  # more than are kept
    assert [again(manifest) for manifest in many + many] == many + many


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([], "WeightManifest.tensors must be bytes"),
        (b"", "one msgpack value"),
        (msgpack.packb([["a", "float32", [2], 0]]), "the 5 fields of TensorSpec"),
        (msgpack.packb([[[]] * 60_000] * 20), "at most 1048576 elements"),
    ],
)
def test_a_layout_is_checked_as_the_rest(tensors: object, complaint: str) -> None:
    fields = msgpack.unpackb(encode(_manifest(1, "a"), run="r", incarnation="a", seq=1))
    frame = msgpack.packb({**fields, "tensors": tensors})
    assert isinstance(frame, bytes)

    with pytest.raises(RecordError, match=complaint):
        decode(frame, max_bytes=2**24)


def test_values_of_the_wrong_type_do_not_leave() -> None:
    for message, complaint in [
        (LeaseRequest(n=2**70, version=PolicyVersion(1, 0)), "64 bits"),
        (LeaseRequest(n=1.0, version=PolicyVersion(1, 0)), "64 bits"),  # type: ignore[arg-type]
        (BeatRequest((), PolicyVersion(1, 0), {"x": math.inf}), "finite"),
        (BeatRequest([], PolicyVersion(1, 0), {}), "a tuple"),  # type: ignore[arg-type]
        (Verdicts((TaskVerdict(1, "OK"),)), "a Verdict"),  # type: ignore[arg-type]
        (LeaseReply("\ud800", (), None), "a string"),
        (Verdict.OK, "registered type"),
    ]:
        with pytest.raises(RecordError, match=complaint):
            encode(message, run="r", incarnation="a", seq=1)


def test_a_refused_frame_still_names_its_sequence() -> None:
    assert sequence_of(pack(v=9, seq=77)) == 77
    assert sequence_of(pack(v=9, seq="x")) == 0
    assert sequence_of(pack(v=9, seq=77)[:3]) == 0


def test_a_spec_comes_back_from_the_store_or_is_a_record_error() -> None:
    spec = TaskSpec(group_id=7, index=7, seed=2**62, purpose="train", temperature=0.7)

    assert decode_spec(encode_spec(spec)) == spec
    assert len(encode_spec(spec)) < 64
    for stored in (b"", b"\x95", encode(Bye(), run="r", incarnation="a", seq=1)):
        with pytest.raises(RecordError):
            decode_spec(stored)
    with pytest.raises(RecordError, match="purpose must be train or eval"):
        decode_spec(encode_spec(dataclasses.replace(spec, purpose="else")))


def test_a_heartbeat_of_a_full_actor_is_compact() -> None:
    beats = tuple(Beat(10**9 + i, 10**15 + i) for i in range(256))
    frame = encode(BeatRequest(beats, PolicyVersion(1, 5), {}), run="r", incarnation="a", seq=1)

    assert len(frame) < 256 * 24
