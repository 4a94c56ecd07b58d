"""Bytes that lie: random ones, valid ones with something changed, deep, huge and not a number."""

from __future__ import annotations

import json

import msgpack
from hypothesis import strategies as st

_numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
_texts = st.text(max_size=8) | st.sampled_from(["v", "run", "step", "schema", "sha256", "1"])
_leaves = st.none() | st.booleans() | _numbers | _texts
_trees = st.recursive(
    _leaves | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)
_json_trees = st.recursive(
    _leaves | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)
_deep = st.builds(
    lambda unit, depth, end: unit * depth + end,
    st.sampled_from([b"\x91", b"\x81\xa1a", b"[", b'{"a":', b"- ", b"{a: "]),
    st.sampled_from([10, 600, 5000, 60_000]),
    st.sampled_from([b"", b"\xc0", b"0", b"\n"]),
)
_sizes = st.sampled_from(
    [b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)


def pack(tree: object) -> bytes:
    """Write a tree as msgpack."""
    packed = msgpack.packb(tree, unicode_errors="surrogatepass")
    assert isinstance(packed, bytes)
    return packed


def mutations(valid: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Valid bytes with up to four places overwritten, cut out or stuffed."""
    edits = st.lists(
        st.tuples(st.integers(0, 2**16), st.integers(0, 4), st.binary(max_size=5)), max_size=4
    )
    return st.builds(_mutate, st.sampled_from(valid), edits)


def lies(valid: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Anything that might arrive where these were expected."""
    return st.one_of(
        mutations(valid),
        st.binary(max_size=200),
        _trees.map(pack),
        _json_trees.map(lambda tree: json.dumps(tree).encode()),
        _deep,
        st.builds(lambda size, rest: size + rest, _sizes, st.binary(max_size=20)),
    )


def _mutate(valid: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    data = bytearray(valid)
    for place, removed, inserted in edits:
        start = place % (len(data) + 1)
        data[start : start + removed] = inserted
    return bytes(data)
