"""Seal of a slot in shared memory, by which readers see writes to it: a seqlock.

The seal is a number in a file beside the slot. Its one writer, the learner, makes it odd before the
first byte and even after the last. Readers, the actors of this machine, hold no lock, so that no
reader can delay the writer. If a reader sees the same even number twice, the slot was unchanged in
between. A mapping outlives the folder.

Writer and readers are thousands of instructions and some system calls away from the bytes when they
touch the number, so that no processor's order of memory accesses shows.
"""

from __future__ import annotations

import mmap
from pathlib import Path

NUM_BYTES = 8


def seal_of(slot: Path) -> Path:
    """Return the file of a slot's seal."""
    return slot.with_name(f"{slot.name}.seal")


class Seal:
    """The number of one slot.

    Args:
        slot: File of the slot.
        is_writer: This process is the one that writes to the slot.

    Raises:
        OSError: The slot has no seal.
        ValueError: The seal is empty.
    """

    def __init__(self, slot: Path, *, is_writer: bool = False) -> None:
        access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
        with seal_of(slot).open("r+b" if is_writer else "rb") as file:
            self._number = memoryview(mmap.mmap(file.fileno(), NUM_BYTES, access=access)).cast("Q")

    @property
    def number(self) -> int:
        """The number, which is odd during a write and different after it."""
        return self._number[0]

    @property
    def is_open(self) -> bool:
        """Whether the slot is being written to."""
        return self.number % 2 == 1

    def open(self) -> None:
        """Note that the bytes are about to change."""
        assert not self.is_open, "one writer at a time"
        self._number[0] += 1

    def close(self) -> None:
        """Note that the bytes are complete again."""
        assert self.is_open, "what was not open cannot be closed"
        self._number[0] += 1
