"""Names that a Lua file takes from outside and gives away, by the compiler of Lua 5.1 itself.

Compiled alone, a file's free names are the globals that its bytecode reads or writes; their layout
is that of Lua 5.1's `ldump.c`, on machines with 64 bits.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from lupa import lua51

GET_GLOBAL, SET_GLOBAL = 5, 7
NIL, BOOLEAN, NUMBER, STRING = 0, 1, 3, 4
HEADER_BYTES = 12

_TOP_LEVEL = re.compile(r"^local (?:function )?([\w, ]+?)(?: =|\(|$)", re.MULTILINE)


def defined_names(source: str) -> list[str]:
    """Locals of a library's outermost level, which come before whatever includes it."""
    return [name for names in _TOP_LEVEL.findall(source) for name in names.split(", ")]


def free_names(source: str) -> set[str]:
    """Names that a file uses and does not define itself."""
    lua = lua51.LuaRuntime(encoding=None)
    dump = lua.eval(b"function(text) return string.dump(assert(loadstring(text))) end")
    return set(_globals(_Reader(dump(source.encode()))))


class _Reader:
    """Bytes read one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, HEADER_BYTES

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return int(value)

    def skip(self, num_bytes: int) -> None:
        self._at += num_bytes

    def text(self) -> str:
        length = self.take("Q")
        self._at += length
        return self._data[self._at - length : self._at - 1].decode() if length else ""


def _globals(reader: _Reader) -> Iterator[str]:
    """Names of the globals of one function and of those inside it."""
    reader.text()  # where it is from
    reader.skip(4 + 4 + 4)  # first and last line; counts of upvalues, parameters, registers
    code = [reader.take("I") for _ in range(reader.take("I"))]
    constants = [_constant(reader) for _ in range(reader.take("I"))]
    for instruction in code:
        if instruction & 0x3F in (GET_GLOBAL, SET_GLOBAL):
            yield constants[instruction >> 14]
    for _ in range(reader.take("I")):
        yield from _globals(reader)
    reader.skip(4 * reader.take("I"))  # line of each instruction
    for _ in range(reader.take("I")):  # locals and where they live
        reader.text()
        reader.skip(8)
    for _ in range(reader.take("I")):  # upvalues
        reader.text()


def _constant(reader: _Reader) -> str:
    kind = reader.take("B")
    if kind == STRING:
        return reader.text()
    reader.skip({NIL: 0, BOOLEAN: 1, NUMBER: 8}[kind])
    return ""
