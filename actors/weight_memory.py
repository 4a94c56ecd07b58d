"""Reading a version out of the publisher's memory, by actors of the same machine and user.

The publisher says in which file a version lies (`Announce.memory`); its name cannot be guessed, so
whoever finds it is on that machine. No lock is held: should the learner need the file again before
all of it is read, the digest shows it, and the version is pulled. A dead reader delays nobody.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from broker.manifest import WeightManifest, digest_of
from configs.errors import WeightsError

BUCKET_BYTES = 2**20
"""Copied while the one before it is digested; both stay in a core's cache."""
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def can_read(path: str) -> bool:
    """Say whether the publisher's memory is this machine's, and ours to read."""
    return bool(path) and os.access(path, os.R_OK)


def read_version(path: str, manifest: WeightManifest, memory: mmap.mmap) -> None:
    """Fill `memory` with a version; blocks.

    Raises:
        WeightsError: it is no longer there, or was written to meanwhile.
    """
    try:
        file = os.open(path, FLAGS)
    except OSError as error:
        raise WeightsError(f"{path} must be readable, got {error.strerror}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != manifest.num_bytes:
            raise WeightsError(f"{path} must be a file of {manifest.num_bytes} bytes")
        digest = digest_of(_buckets(file, memory))
    finally:
        os.close(file)
    if digest != manifest.digest:
        raise WeightsError(f"digest must be {manifest.digest}, got {digest}: overtaken, or corrupt")


def _buckets(file: int, memory: mmap.mmap) -> Iterator[memoryview]:
    """Copy bucket by bucket; each is given out while the next one is copied."""
    with memoryview(memory) as whole, ThreadPoolExecutor(1, "weights-copy") as copier:

        def copy(start: int) -> memoryview:
            bucket = whole[start : start + BUCKET_BYTES]
            if os.preadv(file, [bucket], start) != len(bucket):
                raise WeightsError("the publisher's file must keep its length, and got shorter")
            return bucket

        starts = range(0, len(whole), BUCKET_BYTES)
        ahead = copier.submit(copy, starts[0])
        for start in starts[1:]:
            bucket, ahead = ahead.result(), copier.submit(copy, start)
            yield bucket
        yield ahead.result()
