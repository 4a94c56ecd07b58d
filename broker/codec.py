"""Messages as bytes: one msgpack map {v, run, inc, seq, op, ...fields of the struct} in one frame.

Owns the wire form and its checks, in both directions, derived once from the types of the
dataclasses. A struct inside a message is an array of its fields in order, because heartbeats carry
many of them. Closed: an unknown version, operation or field, a wrong type, an integer beyond 64
bits or a float that is not finite is a `RecordError`, and no input raises anything else. Knows
nothing of what messages mean.

Example:
    frame = encode(Bye(), run="demo", incarnation="actor-1", seq=7)
    envelope = decode(frame, max_bytes=1 << 20)
    assert envelope.message == Bye()
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from configs.errors import RecordError

from . import messages
from .manifest import WeightManifest
from .packing import MALFORMED, pack, unpack
from .shapes import Shape, shape_of, struct_fields, text_shape

HEADER = ("v", "run", "inc", "seq", "op")
HEADER_BYTES = 1024  # of it, with names as long as they may be


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded message and its header. Producer: `decode`. Consumer: whoever owns the socket."""

    v: int
    run: str
    inc: str
    """Incarnation of the sender."""
    seq: int
    """Number of the request within its incarnation; the reply carries the same."""
    message: object
    """An instance of a registered dataclass."""


@dataclass(frozen=True, slots=True)
class _Body:
    """The compiled form of one registered dataclass."""

    op: str
    kind: type
    names: frozenset[str]
    fields: tuple[tuple[str, Shape], ...]


_by_op: dict[str, _Body] = {}
_by_kind: dict[type, _Body] = {}
_text = text_shape("the message's header")


def register(op: str, kind: type) -> None:
    """Give a dataclass its fixed name on the wire."""
    fields = struct_fields(kind)
    names = frozenset(name for name, _ in fields)
    assert op not in _by_op and kind not in _by_kind, f"{op} is registered twice"
    assert not names & set(HEADER), f"{kind.__name__} uses a name of the header"
    body = _Body(op=op, kind=kind, names=names, fields=fields)
    _by_op[op] = _by_kind[kind] = body


def encode(message: object, *, run: str, incarnation: str, seq: int) -> bytes:
    """Turn a message into the bytes of its frame.

    Raises:
        RecordError: a field holds a value that its type does not allow.
    """
    body = _by_kind.get(type(message))
    if body is None:
        raise RecordError(f"message must be of a registered type, got {type(message).__name__}")
    wire: dict[str, object] = {
        "v": messages.WIRE_VERSION,
        "run": run,
        "inc": incarnation,
        "seq": seq,
        "op": body.op,
    }
    for name, shape in body.fields:
        wire[name] = shape.pack(getattr(message, name))
    return pack(wire)


def decode(frame: bytes, *, max_bytes: int) -> Envelope:
    """Turn the bytes of a frame into a checked message.

    Raises:
        RecordError: the bytes are not exactly one well-formed message of this wire version.
    """
    raw = unpack(frame, max_bytes=max_bytes)
    if type(raw) is not dict:
        raise RecordError(f"a message must be a map, got {type(raw).__name__}")
    version = raw.pop("v", None)
    if type(version) is not int or version != messages.WIRE_VERSION:
        raise RecordError(
            f"wire version must be {messages.WIRE_VERSION}, got {version!r:.20}; "
            "both ends must run the same version of Nyala"
        )
    run, inc, op = (_text.unpack(raw.pop(key, None)) for key in ("run", "inc", "op"))
    seq = raw.pop("seq", None)
    if type(seq) is not int or not 0 <= seq < 2**63:
        raise RecordError(f"seq must be an integer of 63 bits, got {seq!r:.20}")
    body = _by_op.get(op)  # type: ignore[call-overload]  # a str: _text has checked it
    if body is None:
        raise RecordError(f"operation must be a registered one, got {op!r:.40}")
    if raw.keys() != body.names:
        raise RecordError(
            f"{body.op} must have exactly the fields {sorted(body.names)}, "
            f"got {sorted(map(str, raw))!r:.200}"
        )
    values = {name: shape.unpack(raw[name]) for name, shape in body.fields}
    return Envelope(v=version, run=str(run), inc=str(inc), seq=seq, message=body.kind(**values))


def sequence_of(frame: bytes) -> int:
    """Return the `seq` of a frame that is not decoded, so that its sender hears of it, or 0.

    Reads the header alone: what a peer sends that is refused anyway must cost next to nothing.
    """
    reader = msgpack.Unpacker(raw=False, max_buffer_size=HEADER_BYTES, max_ext_len=0)
    reader.feed(frame[:HEADER_BYTES])
    try:
        for _ in range(min(reader.read_map_header(), len(HEADER))):
            name, value = reader.unpack(), reader.unpack()
            if name == "seq":
                return value if type(value) is int and 0 <= value < 2**63 else 0
    except MALFORMED:
        pass
    return 0


def encode_spec(spec: messages.TaskSpec) -> bytes:
    """Turn what to make into the bytes that the store keeps with its task."""
    return pack(_spec.pack(spec))


def decode_spec(stored: bytes) -> messages.TaskSpec:
    """Turn stored bytes back into what to make.

    Raises:
        RecordError: these bytes are not a task's.
    """
    spec = _spec.unpack(unpack(stored, max_bytes=4096))  # tens of bytes in practice
    assert isinstance(spec, messages.TaskSpec)
    if spec.purpose not in ("train", "eval"):
        raise RecordError(f"purpose must be train or eval, got {spec.purpose!r:.20}")
    return spec


_spec = shape_of(messages.TaskSpec, "spec")

for _op, _kind in {
    "hello": messages.Hello,
    "welcome": messages.Welcome,
    "lease": messages.LeaseRequest,
    "leases": messages.LeaseReply,
    "beat": messages.BeatRequest,
    "verdicts": messages.Verdicts,
    "submit": messages.SubmitRequest,
    "release": messages.ReleaseRequest,
    "fail": messages.FailRequest,
    "bye": messages.Bye,
    "status": messages.StatusRequest,
    "state": messages.StatusReply,
    "revoke": messages.RevokeRequest,
    "drain": messages.DrainRequest,
    "receipt": messages.Receipt,
    "refusal": messages.Refusal,
    "manifest": WeightManifest,
}.items():
    register(_op, _kind)
