"""Files in shared memory in which arriving weights are assembled; mapped, and used again.

Three or four alternate: one is being applied, one waits for it, one is being filled, and the newest
is kept because a sparse update would begin from it. A file whose filling was broken off may still
be written to by a stuck thread, so it is discarded and never used again. None is cut to another
size, as a card may have its pages (`actors/engine/weights/`): a new one is made. An actor that
reads the publisher's memory has none: there, the file is the publisher's, and none of this is done
to it.
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
    """A file and its memory."""

    path: Path
    memory: mmap.mmap
    is_whole: Callable[[], bool] | None = None
    """Of the publisher's own memory: False once others may lie there. None = it is this actor's."""


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version whose bytes are whole and checked, in their file."""

    manifest: WeightManifest
    file: StagingFile

    @property
    def weights(self) -> StagedWeights:
        """As an engine takes them."""
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
        """Return a file of this size with arbitrary contents.

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
        """Make a file of any size, which its user discards.

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
        """Add a user to a file, who will release it too; none of them writes to it."""
        self._shared[file] += 1

    def release(self, file: StagingFile) -> None:
        """Return a file; one of ours may be acquired again when its last user has released it."""
        if self._shared[file]:
            self._shared[file] -= 1
        else:
            del self._shared[file]
            if file.is_whole is None:
                self._free.append(file)

    def discard(self, file: StagingFile) -> None:
        """Remove a file that a stuck thread may still write to; its memory outlives it."""
        file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files."""
        self._free.clear()
        self._shared.clear()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
