"""Seal of a slot in shared memory, by which readers see that it was written to: a seqlock.

A number in a file beside the slot's: its one writer makes it odd before the first byte and even
after the last. Readers hold no lock, so that none of them can delay the writer; what lay there
between two looks at one even number was whole all the time. A mapping outlives the folder.

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
        slot: File of its bytes.
        is_writer: Whether this process is the one that writes there.

    Raises:
        OSError: It has no seal.
        ValueError: Its seal is empty.
    """

    def __init__(self, slot: Path, *, is_writer: bool = False) -> None:
        access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
        with seal_of(slot).open("r+b" if is_writer else "rb") as file:
            self._number = memoryview(mmap.mmap(file.fileno(), NUM_BYTES, access=access)).cast("Q")

    @property
    def number(self) -> int:
        """Odd while the slot is written to; never the same again afterwards."""
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
        """Note that they are whole again."""
        assert self.is_open, "what was not open cannot be closed"
        self._number[0] += 1
