"""Versions that this actor serves to peers: one complete, one arriving, and updates to them.

Tables of the places of bytes, and of those that are checked, without sockets. Memory belongs to the
caller, who releases it here before writing to it again. The publisher's memory, which changes
without notice, is offered only as long as its version is complete. Updates are kept for as long as
the publisher's chain has them, so all of them together are shorter than a version.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from broker.protocol.manifest import BASE, SparseLink
from broker.protocol.weight_messages import Pull, SlicePending, VersionGone, WeightChunk
from buffer.record.episode import PolicyVersion


@dataclass(frozen=True, slots=True)
class _Part:
    """The version or update that is arriving, or an update that is kept."""

    version: PolicyVersion
    memory: mmap.mmap | bytearray
    base: PolicyVersion | None = None
    """Version that the sparse update begins at; None = all bytes of the version."""
    arrived: set[int] = field(default_factory=set)
    """Offsets of the slices that have arrived."""


class HeldWeights:
    """Answers pulls out of staged memory."""

    def __init__(self) -> None:
        self._part: _Part | None = None
        self._updates: dict[tuple[PolicyVersion, PolicyVersion], _Part] = {}
        """Sparse updates by base and version."""
        self._whole: tuple[PolicyVersion, mmap.mmap] | None = None
        self._is_whole: Callable[[], bool] | None = None
        self.changed = asyncio.Event()
        """Set when a delayed pull may have an answer; `WeightShare` clears it."""

    def begin_version(self, version: PolicyVersion, memory: mmap.mmap) -> None:
        """Offer the slices of a version as they arrive, in place of what was arriving before."""
        self._part = _Part(version, memory)

    def begin_update(self, link: SparseLink, memory: bytearray) -> None:
        """Offer the slices of a sparse update as they arrive, and keep the update."""
        self._part = _Part(link.version, memory, link.base)
        self._updates[link.base, link.version] = self._part

    def arrived(self, offset: int) -> None:
        """Note a checked slice of the arriving version or update."""
        if self._part is not None:
            self._part.arrived.add(offset)
            self.changed.set()

    def abandon(self) -> None:
        """Stop offering the version or update that was arriving."""
        part, self._part = self._part, None
        if part is not None and part.base is not None:
            self._updates.pop((part.base, part.version), None)

    def keep_updates(self, links: Iterable[SparseLink]) -> None:
        """Stop offering all updates but these."""
        kept = {(link.base, link.version) for link in links}
        self._updates = {key: part for key, part in self._updates.items() if key in kept}

    @property
    def whole(self) -> tuple[PolicyVersion, mmap.mmap] | None:
        """The newest complete version; None once it may be overwritten, so read it once."""
        is_gone = self._is_whole is not None and not self._is_whole()
        return None if is_gone else self._whole

    def hold(
        self,
        version: PolicyVersion,
        memory: mmap.mmap,
        *,
        is_whole: Callable[[], bool] | None = None,
    ) -> None:
        """Offer a complete version in place of any other, for as long as `is_whole` is true."""
        self._whole, self._part = (version, memory), None
        self._is_whole = is_whole
        self.changed.set()

    def release(self) -> None:
        """Stop offering the complete version."""
        self._whole = self._is_whole = None

    def answer(self, pull: Pull) -> WeightChunk | SlicePending | VersionGone:
        """Return the slice, or `SlicePending` if it is still to arrive, or `VersionGone`."""
        memory = self._find(pull)
        place = pull.within(len(memory)) if memory is not None else None
        if memory is not None and place is not None:
            payload = bytes(memory[place])
            if self._find(pull) is memory:  # still there, so the copy is of that version
                return WeightChunk(pull.version, pull.offset, payload, pull.base)
        if memory is not None or not self._may_arrive(pull):
            return VersionGone(pull.version, pull.offset)
        return SlicePending(pull.version, pull.offset)

    def _find(self, pull: Pull) -> mmap.mmap | bytearray | None:
        whole = self.whole
        if pull.base is None and whole is not None and whole[0] == pull.version:
            return whole[1]
        part = self._part_of(pull)
        return part.memory if part is not None and pull.offset in part.arrived else None

    def _part_of(self, pull: Pull) -> _Part | None:
        """Return the version of a pull if it is arriving, or its update."""
        if pull.base is not None:
            return self._updates.get((pull.base, pull.version))
        part = self._part
        is_its = part is not None and (part.base, part.version) == (None, pull.version)
        return part if is_its else None

    def _may_arrive(self, pull: Pull) -> bool:
        """Return whether the version or update of a pull may still arrive here."""
        whole, part = self.whole, self._part
        if (asked := self._part_of(pull)) is not None:
            return pull.within(len(asked.memory)) is not None
        if pull.base is None:
            return whole is None or pull.version >= whole[0]
        if pull.base == BASE:
            return False  # adapters are not passed on
        reached = [whole[0]] if whole is not None else []
        if part is not None and part.base is None:  # no update leads there
            reached.append(part.version)
        return all(pull.version > version for version in reached)
