"""The weight manifest: layout, digests and probe of a policy version, and updates that lead to it.

Producer: the learner. Consumer: the publisher and the actors' receivers. The canonical wire form of
a version is the concatenation of its tensors (Hugging Face names, publish dtype, order of the
manifest, contiguous, little-endian, no padding); `digest` is the BLAKE3 of these bytes, and
`checksum` their XXH3.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Annotated

from blake3 import blake3
from msgspec import Meta
from xxhash import xxh3_128

from buffer.record.episode import PolicyVersion

from .fields import Many, MessagePart, Real, Text, Whole, WireMessage

DIGEST_BYTES = 32
BASE = PolicyVersion(0, 0)
"""Version of the frozen model that adapters are added to; no learner has this lineage."""
MAX_DIMENSIONS = 16


def digest_of(
    parts: Iterable[mmap.mmap | memoryview | bytearray | bytes], *, threads: int = 1
) -> str:
    """Return the BLAKE3 digest, in hexadecimal, of wire bytes that come in parts, in order.

    A cryptographic hash, because a process group does not authenticate its members, and on one
    core several times as fast as SHA-256, which would take longer than the transfer it checks.
    """
    running = blake3(max_threads=threads)
    for part in parts:
        running.update(part)
    return str(running.hexdigest())


def checksum_of(memory: mmap.mmap | bytes | bytearray) -> str:
    """Return the checksum of wire bytes: XXH3 of 128 bits, in hexadecimal.

    It takes half the time of BLAKE3, and is enough where no other user could have
    written there.
    """
    return xxh3_128(memory).hexdigest()


def chunk_digests(memory: mmap.mmap | memoryview | bytes, chunk_bytes: int) -> bytes:
    """Return the BLAKE3 digests of wire bytes cut into chunks, `DIGEST_BYTES` each, in order."""
    with memoryview(memory) as whole:
        starts = range(0, len(whole), chunk_bytes)
        return b"".join(blake3(whole[i : i + chunk_bytes]).digest() for i in starts)


class TensorSpec(MessagePart, frozen=True):
    """The place of one tensor in the wire bytes of a version."""

    name: Text
    dtype: Text
    """`float32` or `bfloat16`."""
    shape: Annotated[tuple[Whole, ...], Meta(max_length=MAX_DIMENSIONS)]
    offset: Whole
    """Its first byte."""
    num_bytes: Whole


class Probe(MessagePart, frozen=True):
    """A sequence of tokens and the learner's log-probs of its tokens 1.. at temperature 1."""

    token_ids: Many[Whole]
    logprobs: Many[Real]
    """len(token_ids) - 1 values, nats."""
    rounding_mean: Real = 0.0
    """Mean change of the log-probs when all outputs of modules are rounded once more, nats."""
    rounding_max: Real = 0.0
    """Largest change of a log-prob by that rounding, nats."""


class SparseLink(MessagePart, frozen=True):
    """A sparse update (`sparse.py`) that turns the bytes of `base` into those of `version`."""

    base: PolicyVersion
    version: PolicyVersion
    num_bytes: Whole


class AdapterSpec(MessagePart, frozen=True):
    """An adapter that turns the bytes of `BASE` into those of a version (`low_rank.py`).

    Its bytes are, for each of `tensors`, A [rank, columns] and B [rows, rank] in float32.
    """

    base: Text
    """Digest of the base's bytes, which have the layout of the version's."""
    rank: Whole
    scale: Real
    """Factor of B A."""
    num_bytes: Whole
    tensors: Many[Whole]
    """Places of the matrices in the manifest's list, in order."""


class WeightManifest(WireMessage, frozen=True, tag="manifest"):
    """Layout, digest and probe of one policy version."""

    version: PolicyVersion
    digest: Text
    checksum: Text
    """XXH3 of the bytes, for readers of the publisher's memory."""
    num_bytes: Whole
    tensors: Many[TensorSpec]
    probe: Probe
    adapter: AdapterSpec | None = None
    """The same version in a shorter form; None = all weights are trained."""
