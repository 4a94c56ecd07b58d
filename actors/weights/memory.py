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
from broker.protocol.weight_messages import Announce, Moved
from broker.weights.seal import Seal
from configs.errors import WeightsError

from .counters import WeightCounters
from .staging_files import StagingFile

log = structlog.get_logger()

SHORT_BYTES = 4 * 2**20
"""Read on the event loop, in a millisecond or two: a thread takes about as long to come and go."""
BUCKET_BYTES = 2**19
"""Unit of the checksum: other threads run in between."""
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
OPEN_FILES = Path("/proc/self/fd")
"""Linux has it; elsewhere a file whose name is gone cannot be opened again."""


class _Slot:
    """A slot that is mapped here, for as long as somebody uses it.

    Args:
        path: Its file.
        num_bytes: Length that it must have.

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
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
            raise WeightsError(f"{path} must be a file of {num_bytes} bytes")
        self.memory = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
        self.path = Path(f"/proc/{os.getpid()}/fd/{file}" if OPEN_FILES.exists() else path)
        """A name for this actor's engine, which is good when the learner has ended."""

    @property
    def number(self) -> int:
        """Of its seal."""
        return self._seal.number

    def is_still(self, number: int) -> bool:
        """Return whether nothing has been written there since the seal had this number."""
        return self.number == number


class PublisherMemory:
    """The publisher's slots, as far as this process has read them.

    Args:
        counters: Counts versions read.
    """

    def __init__(self, counters: WeightCounters) -> None:
        self._counters = counters
        self._folder = Path()
        self._slots: dict[str, _Slot] = {}
        """By name; kept, because to touch a new mapping first costs a quarter of a copy."""

    def can_fetch(self, wanted: Announce | Moved) -> bool:
        """Return whether the file of this version is on this machine and may be read."""
        return bool(wanted.memory) and os.access(wanted.memory, os.R_OK)

    async def borrow(self, wanted: Announce | Moved) -> StagingFile | None:
        """Return a version where it lies, checked; None if it is no longer there."""
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

    def _open(self, path: str, num_bytes: int) -> _Slot:
        folder = Path(path).parent
        if folder != self._folder:  # of another learner: let go of the memory of the last one
            self._folder, self._slots = folder, {}
        if path not in self._slots:
            self._slots[path] = _Slot(path, num_bytes)
        return self._slots[path]


def _check(slot: _Slot, number: int, manifest: WeightManifest) -> None:
    """Show that the version lies there, and has since the seal had this number; blocks.

    Raises:
        WeightsError: It does not.
    """
    if number % 2 == 1:
        raise WeightsError(f"seal must be closed, got {number}: a newer version is being written")
    found = xxh3_128()
    with memoryview(slot.memory) as whole:
        for start in range(0, len(whole), BUCKET_BYTES):
            found.update(whole[start : start + BUCKET_BYTES])
    checksum = found.hexdigest()
    if checksum != manifest.checksum or not slot.is_still(number):
        raise WeightsError(
            f"checksum must be {manifest.checksum}, got {checksum}: overtaken, or corrupt"
        )
