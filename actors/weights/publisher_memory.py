"""Reading a version out of the publisher's memory, by actors of the same machine and user.

The publisher says in which file a version lies (`Announce.memory`); its name cannot be guessed, so
whoever finds it is on that machine. No lock is held: should the learner need the file again before
all of it is read, the checksum shows it, and the version is pulled. A dead reader delays nobody.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from broker.protocol.manifest import WeightManifest
from configs.errors import WeightsError

BUCKET_BYTES = 2**19
"""What is added to the checksum right after it was copied, while it is in the core's cache."""
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PublisherMemory:
    """The publisher's slots, as far as this process has read them."""

    def __init__(self) -> None:
        self._folder = Path()
        self._mapped: dict[int, mmap.mmap] = {}
        """By inode; kept, because to touch a new mapping first costs a quarter of the copy."""

    @staticmethod
    def has(path: str) -> bool:
        """Say whether this file is on this machine, and ours to read."""
        return bool(path) and os.access(path, os.R_OK)

    def read(self, path: str, manifest: WeightManifest, memory: mmap.mmap) -> None:
        """Fill `memory` with a version; blocks.

        Raises:
            WeightsError: it is no longer there, or was written to meanwhile.
        """
        checksum = _copy(self._open(path, manifest.num_bytes), memory)
        if checksum != manifest.checksum:
            raise WeightsError(
                f"checksum must be {manifest.checksum}, got {checksum}: overtaken, or corrupt"
            )

    def _open(self, path: str, num_bytes: int) -> mmap.mmap:
        folder = Path(path).parent
        if folder != self._folder:  # of another learner: let go of the memory of the last one
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
