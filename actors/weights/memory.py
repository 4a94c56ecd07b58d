"""The publisher's memory, for actors of the same machine and user: versions used where they lie.

An announcement names the file in which the version lies (`Announce.memory`). Its name cannot be
guessed, so an actor that finds it is on that machine. It is mapped for reading and nothing is
copied, so the machine holds the learner's slots and no bytes for each actor. No lock is held: the
seal beside the file (`broker.weights.seal`) shows when the learner has begun to reuse it, and who
still reads it then takes a newer version, or pulls. A dead reader delays no other process.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import stat
import weakref
from functools import partial
from pathlib import Path

import structlog
from xxhash import xxh3_128

from broker.protocol.manifest import WeightManifest
from broker.protocol.weight_messages import Announce, VersionReplaced
from broker.weights.seal import Seal
from configs.errors import WeightsError

from .counters import WeightCounters
from .staging_files import StagingFile

log = structlog.get_logger()

SHORT_BYTES = 4 * 2**20
"""Shorter versions are checked on the event loop, in the time that a thread takes to start."""
BUCKET_BYTES = 2**19
"""Bytes in one step of the checksum: other threads run between steps."""
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
OPEN_FILES = Path("/proc/self/fd")
"""A folder of Linux; elsewhere a file whose name is gone cannot be opened again."""


class _MappedSlot:
    """A slot of the publisher that is mapped here for as long as it is used.

    Args:
        path: File of the slot.
        num_bytes: Length that the file must have.

    Raises:
        WeightsError: There is no such file.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        try:
            self._seal = Seal(Path(path))
            file = os.open(path, FLAGS)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path} and its seal must be readable, got {error}") from error
        # Not sooner: the number of a closed file is given to the next one that is opened.
        weakref.finalize(self, os.close, file)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
            raise WeightsError(f"{path} must be a file of {num_bytes} bytes, got {status.st_size}")
        self.memory = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
        self.path = Path(f"/proc/{os.getpid()}/fd/{file}" if OPEN_FILES.exists() else path)
        """A path for this actor's engine, which is valid even when the learner has ended."""

    @property
    def number(self) -> int:
        """Present number of the slot's seal."""
        return self._seal.number

    def is_still(self, number: int) -> bool:
        """Return whether the slot is unchanged since its seal had this number."""
        return self.number == number


class PublisherMemory:
    """The publisher's slots, as far as this process has read them.

    Args:
        counters: Counts versions read.
    """

    def __init__(self, counters: WeightCounters) -> None:
        self._counters = counters
        self._folder = Path()
        self._slots: dict[str, _MappedSlot] = {}
        """Slots by path; kept, as the first read of a new mapping costs a quarter of a copy."""

    def can_fetch(self, wanted: Announce | VersionReplaced) -> bool:
        """Return whether the file of this version is on this machine and may be read."""
        return bool(wanted.memory) and os.access(wanted.memory, os.R_OK)

    async def borrow(self, wanted: Announce | VersionReplaced) -> StagingFile | None:
        """Return a checked version where it lies; None if it is no longer there, or corrupt.

        A reason for None is logged.
        """
        try:
            slot = self._open(wanted.memory, wanted.manifest.num_bytes)
            number = slot.number
            if wanted.manifest.num_bytes > SHORT_BYTES:
                await asyncio.to_thread(_check, slot, number, wanted.manifest)
            else:
                _check(slot, number, wanted.manifest)
        except WeightsError as error:
            log.warning("publisher's memory not read", reason=str(error))
            return None
        self._counters.memory_reads += 1
        return StagingFile(slot.path, slot.memory, partial(slot.is_still, number))

    def _open(self, path: str, num_bytes: int) -> _MappedSlot:
        folder = Path(path).parent
        if folder != self._folder:  # of another learner: drop the slots of the last one
            self._folder, self._slots = folder, {}
        if path not in self._slots:
            self._slots[path] = _MappedSlot(path, num_bytes)
        return self._slots[path]


def _check(slot: _MappedSlot, number: int, manifest: WeightManifest) -> None:
    """Check that a slot has the version, unchanged since its seal had this number; blocks.

    Raises:
        WeightsError: The slot has other bytes.
    """
    if number % 2 == 1:
        raise WeightsError(f"seal must be closed, got {number}; a newer version is being written")
    hasher = xxh3_128()
    with memoryview(slot.memory) as whole:
        for start in range(0, len(whole), BUCKET_BYTES):
            hasher.update(whole[start : start + BUCKET_BYTES])
    checksum = hasher.hexdigest()
    if not slot.is_still(number):
        raise WeightsError("a slot must not change while it is read, got a newer version in it")
    if checksum != manifest.checksum:
        raise WeightsError(
            f"the checksum of a slot must be {manifest.checksum}, got {checksum}; it is corrupt"
        )
