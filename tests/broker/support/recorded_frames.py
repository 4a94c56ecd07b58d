"""Frames of a wire version, one for each message, recorded by the code that speaks it.

`python -m tests.broker.support.recorded_frames` records those of this code as
`wire-<version>.jsonl` in `tests/broker/wire/frames/`: do it just before the wire version is raised,
and never again for that version.
"""

from __future__ import annotations

import base64
import json
import typing
from pathlib import Path
from typing import Any

import msgspec

from broker.protocol.codec import WIRE_VERSION, Envelope, encode
from broker.protocol.messages import Verdict
from buffer.record.episode import PolicyVersion

FRAMES = Path(__file__).parents[1] / "wire" / "frames"
KINDS: tuple[type, ...] = typing.get_args(typing.get_type_hints(Envelope)["message"])
EXAMPLES: dict[Any, Any] = {
    int: 7,
    float: 0.5,
    bool: True,
    str: "text",
    bytes: b"\x00\xff",
    type(None): None,
    Verdict: Verdict.GAP,
    PolicyVersion: PolicyVersion(2, 5),
}


def example(kind: Any) -> Any:
    """A value of an annotation in which nothing is left at its default."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in EXAMPLES:
        return EXAMPLES[kind]
    if origin is typing.Annotated:
        return example(arguments[0])
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return tuple(example(each) for each in arguments if each is not Ellipsis)
    if origin is dict:
        return {"name": example(arguments[1])}
    if origin is not None:  # a union: of what is more than None
        return example(next(each for each in arguments if each is not type(None)))
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})


def recorded(version: int, folder: Path = FRAMES) -> dict[str, tuple[bytes, Any]]:
    """Frames of a version by the message's name, each with what it says as plain values."""
    lines = (folder / f"wire-{version}.jsonl").read_text(encoding="utf-8").splitlines()
    found = map(json.loads, lines)
    return {each["message"]: (base64.b64decode(each["frame"]), each["content"]) for each in found}


def plain(message: object) -> Any:
    """A message as plain values."""
    return json.loads(msgspec.json.encode(message))


def record(folder: Path) -> None:
    """Record this code's frames."""
    lines = []
    for number, kind in enumerate(KINDS):
        message = example(kind)
        frame = encode(message, run="demo", incarnation="actor-1", seq=number)
        row = {
            "message": kind.__name__,
            "content": plain(message),
            "frame": base64.b64encode(frame).decode(),
        }
        lines.append(json.dumps(row) + "\n")
    folder.mkdir(exist_ok=True)
    (folder / f"wire-{WIRE_VERSION}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    record(FRAMES)
