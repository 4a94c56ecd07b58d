"""Transport through the publisher's memory, for actors of the same machine and user.

An announcement names the file in which the version lies (`Announce.memory`). Its name cannot be
guessed, so an actor that finds it is on that machine. No lock is held: if the learner reuses the
file before it has been read, the checksum shows it, and the version is pulled. A dead reader delays
no other process.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import stat
from functools import partial
from pathlib import Path

import numpy as np
import structlog
from xxhash import xxh3_128

from broker.protocol.manifest import WeightManifest
from broker.protocol.weight_messages import Announce, Moved
from configs.errors import WeightsError

from .counters import WeightCounters

log = structlog.get_logger()

SHORT_BYTES = 4 * 2**20
"""Read on the event loop, in a millisecond or two: a thread takes about as long to come and go."""
BUCKET_BYTES = 2**19
"""Unit of copying; its checksum is taken right after it, while it is in the core's cache."""
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PublisherMemory:
    """The publisher's slots, as far as this process has read them.

    Args:
        counters: Counts versions read.
    """

    def __init__(self, counters: WeightCounters) -> None:
        self._counters = counters
        self._folder = Path()
        self._mapped: dict[int, mmap.mmap] = {}
        """By inode; kept, because to touch a new mapping first costs a quarter of the copy."""

    def can_fetch(self, wanted: Announce | Moved) -> bool:
        """Return whether the file of this version is on this machine and may be read."""
        return bool(wanted.memory) and os.access(wanted.memory, os.R_OK)

    async def fetch(self, wanted: Announce | Moved, memory: mmap.mmap) -> bool:
        """Copy a version. False: it is no longer there."""
        read = partial(self.read, wanted.memory, wanted.manifest, memory)
        try:
            if wanted.manifest.num_bytes > SHORT_BYTES:
                await asyncio.to_thread(read)
            else:
                read()
        except WeightsError as error:
            log.warning("publisher's memory not read", reason=str(error))
            return False
        self._counters.memory_reads += 1
        return True

    def read(self, path: str, manifest: WeightManifest, memory: mmap.mmap) -> None:
        """Fill `memory` with a version; blocks.

        Raises:
            WeightsError: It is no longer there, or was written to meanwhile.
        """
        checksum = _copy(self._open(path, manifest.num_bytes), memory)
        if checksum != manifest.checksum:
            raise WeightsError(
                f"checksum must be {manifest.checksum}, got {checksum}: overtaken, or corrupt"
            )

    def _open(self, path: str, num_bytes: int) -> mmap.mmap:
        folder = Path(path).parent
        if folder != self._folder:  # of another learner: unmap the memory of the last one
            self._folder, self._mapped = folder, {}
        try:
            file = os.open(path, FLAGS)
        except OSError as error:
            raise WeightsError(f"{path} must be readable, got {error.strerror}") from error
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
                raise WeightsError(f"{path} must be a file of {num_bytes} bytes")
            if found.st_ino not in self._mapped:
                self._mapped[found.st_ino] = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
            return self._mapped[found.st_ino]
        finally:
            os.close(file)


def _copy(source: mmap.mmap, memory: mmap.mmap) -> str:
    """Copy all bytes; returns the checksum of the copy."""
    there, here = np.frombuffer(source, np.uint8), np.frombuffer(memory, np.uint8)
    checksum = xxh3_128()
    for start in range(0, len(here), BUCKET_BYTES):
        bucket = here[start : start + BUCKET_BYTES]
        np.copyto(bucket, there[start : start + BUCKET_BYTES])
        checksum.update(bucket.data)
    return checksum.hexdigest()
