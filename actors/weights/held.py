"""What an actor has of weights, for others to pull: the newest whole version, and one that arrives.

Knows where bytes lie and which of them are checked; sends nothing and owns no memory. Whoever hands
memory in takes it back before it is written to again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from broker.protocol.weight_messages import Chunk, Gone, Later, Pull
from buffer.record.episode import PolicyVersion


@dataclass(frozen=True, slots=True)
class _Part:
    version: PolicyVersion
    memory: mmap.mmap
    arrived: set[int]
    """Offsets of slices."""


class HeldWeights:
    """Answers pulls out of staged memory."""

    def __init__(self) -> None:
        self._whole: tuple[PolicyVersion, mmap.mmap] | None = None
        self._part: _Part | None = None
        self.changed: Callable[[], None] = lambda: None
        """Is called when a pull that was put off may have an answer."""

    def begin(self, version: PolicyVersion, memory: mmap.mmap) -> None:
        """Offer the slices of a version as they arrive."""
        self._part = _Part(version, memory, set())

    def arrived(self, offset: int) -> None:
        """Note a slice of that version, checked."""
        if self._part is not None:
            self._part.arrived.add(offset)
            self.changed()

    def abandon(self) -> None:
        """Take that version back."""
        self._part = None

    def hold(self, version: PolicyVersion, memory: mmap.mmap) -> None:
        """Offer a whole version, instead of any other."""
        self._whole, self._part = (version, memory), None
        self.changed()

    def release(self) -> None:
        """Take the whole version back."""
        self._whole = None

    def answer(self, pull: Pull) -> Chunk | Later | Gone:
        """Return the slice, or say that it may come later, or never."""
        memory = self._find(pull)
        place = pull.within(len(memory)) if memory is not None else None
        if memory is not None and place is not None:
            return Chunk(pull.version, pull.offset, memory[place])
        if pull.base is not None or memory is not None or self._is_past(pull.version):
            return Gone(pull.version, pull.offset)
        return Later(pull.version, pull.offset)

    def _find(self, pull: Pull) -> mmap.mmap | None:
        if pull.base is not None:
            return None
        if self._whole is not None and self._whole[0] == pull.version:
            return self._whole[1]
        part = self._part
        if part is None or part.version != pull.version or pull.offset not in part.arrived:
            return None
        return part.memory

    def _is_past(self, version: PolicyVersion) -> bool:
        return self._whole is not None and version < self._whole[0]
