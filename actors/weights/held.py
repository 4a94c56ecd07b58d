"""Versions that this actor serves to peers: one complete, one arriving.

Tables of where bytes lie and which of them are checked, without sockets. Memory belongs to the
caller, who releases it here before writing to it again. The publisher's, which is written to
without notice, is offered only as long as it is whole.
"""

from __future__ import annotations

import asyncio
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
        self._part: _Part | None = None
        self._whole: tuple[PolicyVersion, mmap.mmap] | None = None
        self._is_whole: Callable[[], bool] | None = None
        self.changed = asyncio.Event()
        """Set when a pull that was put off may have an answer; the share clears it."""

    def begin(self, version: PolicyVersion, memory: mmap.mmap) -> None:
        """Offer the slices of a version as they arrive."""
        self._part = _Part(version, memory, set())

    def arrived(self, offset: int) -> None:
        """Note a slice of that version, checked."""
        if self._part is not None:
            self._part.arrived.add(offset)
            self.changed.set()

    def abandon(self) -> None:
        """Stop offering that version."""
        self._part = None

    @property
    def whole(self) -> tuple[PolicyVersion, mmap.mmap] | None:
        """The newest complete version; None once others may lie in its place: look once."""
        is_gone = self._is_whole is not None and not self._is_whole()
        return None if is_gone else self._whole

    def hold(
        self,
        version: PolicyVersion,
        memory: mmap.mmap,
        *,
        is_whole: Callable[[], bool] | None = None,
    ) -> None:
        """Offer a whole version, instead of any other; where it may be overwritten, while it is."""
        self._whole, self._part = (version, memory), None
        self._is_whole = is_whole
        self.changed.set()

    def release(self) -> None:
        """Stop offering the whole version."""
        self._whole = self._is_whole = None

    def answer(self, pull: Pull) -> Chunk | Later | Gone:
        """Return the slice, or that it comes later, or that it is gone."""
        memory = self._find(pull)
        place = pull.within(len(memory)) if memory is not None else None
        if memory is not None and place is not None:
            payload = memory[place]
            if self._find(pull) is memory:  # still: what has been copied is of that version
                return Chunk(pull.version, pull.offset, payload)
        if pull.base is not None or memory is not None or self._is_past(pull.version):
            return Gone(pull.version, pull.offset)
        return Later(pull.version, pull.offset)

    def _find(self, pull: Pull) -> mmap.mmap | None:
        if pull.base is not None:
            return None
        whole = self.whole
        if whole is not None and whole[0] == pull.version:
            return whole[1]
        part = self._part
        if part is None or part.version != pull.version or pull.offset not in part.arrived:
            return None
        return part.memory

    def _is_past(self, version: PolicyVersion) -> bool:
        whole = self.whole
        return whole is not None and version < whole[0]
