"""Slots: files in shared memory by which the learner hands sealed weights to its publisher.

Neither process ever waits.

A slot is a file of wire bytes with its manifest, its adapter and its seal beside it. Its state is
the name of an empty file, and a rename is what changes it: of two processes that want the same
change exactly one succeeds, also while the other is stopped by a debugger, swapped out or dead. No
lock can be left behind.

    free ──acquire──▶ writing ──seal──▶ ready ──take──▶ taken ──free──▶ free
                         ▲                │ acquire: a version not taken yet is overtaken
                         └────────────────┘
    learner: acquire, seal.  publisher: take, free.

Invariant: the publisher holds at most two slots (the current version, and one that is still being
pulled), so of three there is always one for the learner, and `publish` never waits.

Actors of this machine read a slot where it lies, and hold nothing: the seal (`broker.weights.seal`)
shows them that the learner has begun to write there. It takes the slot that it left longest ago, so
they have the time of two more versions to read one.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from broker.protocol.codec import decode, encode
from broker.protocol.manifest import WeightManifest
from broker.protocol.weight_messages import MAX_WEIGHTS_FRAME
from broker.weights.seal import NUM_BYTES, Seal, seal_of

NUM_SLOTS = 3


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A sealed version, taken by the publisher."""

    index: int
    manifest: WeightManifest
    memory: mmap.mmap
    path: Path
    """File of its bytes, for readers on this machine."""
    adapter: bytes = b""
    """Adapter of the version; empty = it has none."""


class WeightSlots:
    """Slot files in a folder. Producer: learner rank 0. Consumer: the publisher."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[int, mmap.mmap] = {}
        """Mappings that are kept: the first touch of a new one costs a tenth of a broadcast."""
        self._base: mmap.mmap | None = None
        self._seals: dict[int, Seal] = {}
        """Seals of the slots that this process writes to, the one left longest ago first."""

    def add(self, index: int) -> None:
        """Begin to use a slot whose file exists."""
        seal_of(self.path(index)).write_bytes(bytes(NUM_BYTES))
        self._seals[index] = Seal(self.path(index), is_writer=True)
        self.mark(index, "free").touch()

    def acquire(self) -> int:
        """Return a slot to write to, already in state `writing`."""
        for _ in range(NUM_SLOTS):  # the publisher may swap two slots between our two looks
            for state in ("free", "ready"):
                for index, seal in self._seals.items():
                    if self._move(index, state, "writing"):
                        seal.open()
                        self._seals[index] = self._seals.pop(index)  # behind the others
                        return index
        raise AssertionError("the publisher holds every slot")

    def seal(self, index: int, manifest: WeightManifest, adapter: bytes = b"") -> None:
        """Offer a written slot in place of an older one that was not taken.

        From here on its bytes do not change until it is acquired again.

        Args:
            index: Index of the slot.
            manifest: Manifest of the slot's version.
            adapter: Bytes of the version's adapter, if it has one.
        """
        self._adapter(index).write_bytes(adapter)
        frame = encode(manifest, run="", incarnation="", seq=index)
        self._manifest(index).write_bytes(frame)
        self._seals[index].close()
        for other in range(NUM_SLOTS):
            self._move(other, "ready", "free")
        assert self._move(index, "writing", "ready"), f"slot {index} was not being written"

    def has_news(self) -> bool:
        """Return whether there is a sealed version to take."""
        return any(self.mark(index, "ready").exists() for index in range(NUM_SLOTS))

    def take_sealed_slot(self) -> WeightSlot | None:
        """Take the sealed version; None if there is none.

        Raises:
            OSError: No file can be opened; nothing is taken.
        """
        for index in range(NUM_SLOTS):
            if self.mark(index, "ready").exists() and (slot := self._take(index)) is not None:
                return slot
        return None

    def free(self, slot: WeightSlot) -> None:
        """Give a taken slot back. Its mapping stays readable but may change under the reader."""
        assert self._move(slot.index, "taken", "free"), f"slot {slot.index} was not taken"

    def reclaim(self) -> None:
        """Take a dead publisher's slots back: the newest version is ready again, the rest free."""
        taken = [i for i in range(NUM_SLOTS) if self.mark(i, "taken").exists()]
        taken.sort(key=lambda index: self._read(index).version)
        newest = None if self.has_news() or not taken else taken.pop()
        for index in taken:
            self._move(index, "taken", "free")
        if newest is not None:
            self._move(newest, "taken", "ready")

    def path(self, index: int) -> Path:
        """Return the file of a slot's bytes."""
        return self._folder / f"slot-{index}"

    def mark(self, index: int, state: str) -> Path:
        """Return the file that exists while a slot is in `state`."""
        return self._folder / f"slot-{index}.{state}"

    @property
    def base_path(self) -> Path:
        """File of the bytes that adapters are added to; written before the first is sealed."""
        return self._folder / "base"

    def base(self) -> mmap.mmap | None:
        """Map the file of base weights; None if there is none."""
        if self._base is None and self.base_path.exists():
            with self.base_path.open("rb") as file:
                self._base = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._base

    def _manifest(self, index: int) -> Path:
        return self._folder / f"slot-{index}.manifest"

    def _adapter(self, index: int) -> Path:
        return self._folder / f"slot-{index}.adapter"

    def _move(self, index: int, before: str, after: str) -> bool:
        try:
            self.mark(index, before).rename(self.mark(index, after))
        except FileNotFoundError:
            return False
        return True

    def _read(self, index: int) -> WeightManifest:
        return _decoded(self._manifest(index).read_bytes())

    def _take(self, index: int) -> WeightSlot | None:
        """Take a slot if it is still ready. Its files are opened before, and read after that."""
        path = self.path(index)
        self.base()
        if index not in self._mapped:
            with path.open("r+b") as file:
                self._mapped[index] = mmap.mmap(file.fileno(), 0)
        with (
            self._manifest(index).open("rb") as manifest,
            self._adapter(index).open("rb") as adapter,
        ):
            if not self._move(index, "ready", "taken"):
                return None
            return WeightSlot(
                index, _decoded(manifest.read()), self._mapped[index], path, adapter.read()
            )


def _decoded(frame: bytes) -> WeightManifest:
    manifest = decode(frame, max_bytes=MAX_WEIGHTS_FRAME).message
    assert isinstance(manifest, WeightManifest)
    return manifest
