"""Files in shared memory in which arriving weights are assembled; mapped, and used again.

Three or four files alternate: one is being applied, one waits, one is being filled, and the newest
is kept because a sparse update would begin from it. A file whose filling was broken off may still
be written to by a stuck thread, so it is discarded and never used again. No file is cut to another
size, because a card may have its pages mapped (`actors/engine/weights/`): a new file is made. An
actor that reads the publisher's memory has no such files: it uses the publisher's file unchanged.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from actors.engine.engine import StagedWeights
from broker.protocol.manifest import WeightManifest
from broker.weights.shared_memory import SharedFolder


@dataclass(frozen=True, slots=True, eq=False)
class StagingFile:
    """A file of weights and its mapped memory."""

    path: Path
    memory: mmap.mmap
    is_whole: Callable[[], bool] | None = None
    """Returns False once the publisher may have overwritten it; None = the file is the actor's."""


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version whose bytes are complete and checked, in their file."""

    manifest: WeightManifest
    file: StagingFile

    @property
    def weights(self) -> StagedWeights:
        """The version in the form that an engine takes."""
        if self.file.is_whole is None:
            return StagedWeights(self.file.path, self.manifest)
        return StagedWeights(self.file.path, self.manifest, self.file.is_whole)


class StagingFiles:
    """A pool of files of one size.

    Args:
        label: Part of the folder's name.
        fallback: Folder for models that do not fit into shared memory.
    """

    def __init__(self, label: str, *, fallback: Path) -> None:
        self._label = label
        self._fallback = fallback
        self._folder: SharedFolder | None = None
        self._numbers = count()
        self._free: list[StagingFile] = []
        self._shared: Counter[StagingFile] = Counter()

    def acquire(self, num_bytes: int) -> StagingFile:
        """Return a file of this size with arbitrary contents; free ones of another are removed.

        Raises:
            WeightsError: There is no room for it.
        """
        while self._free:
            file = self._free.pop()
            if len(file.memory) == num_bytes:
                return file
            self.discard(file)
        return self.create(num_bytes)

    def create(self, num_bytes: int) -> StagingFile:
        """Make a file of any size, which the caller discards.

        Raises:
            WeightsError: There is no room for it.
        """
        if self._folder is None:
            room = 4 * num_bytes
            self._folder = SharedFolder(self._label, num_bytes=room, fallback=self._fallback)
        path = self._folder.create(f"weights-{next(self._numbers)}", num_bytes)
        with path.open("r+b") as opened:
            return StagingFile(path, mmap.mmap(opened.fileno(), num_bytes))

    def share(self, file: StagingFile) -> None:
        """Add a user to a file, who will release it too; no user writes to it."""
        self._shared[file] += 1

    def release(self, file: StagingFile) -> None:
        """Return a file; the actor's own is free again once its last user has released it."""
        if self._shared[file]:
            self._shared[file] -= 1
        else:
            del self._shared[file]
            if file.is_whole is None:
                self._free.append(file)

    def discard(self, file: StagingFile) -> None:
        """Remove a file that a stuck thread may still write to; its memory stays mapped."""
        file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files and their folder."""
        self._free.clear()
        self._shared.clear()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
