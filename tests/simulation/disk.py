"""A disk that loses what was not synced: it takes the place of `configs.durable.DISK`.

Writes, renames and removals happen in a real folder, as the page cache shows them. What would
survive a power loss is kept apart: the content of a file since its last sync, and the names in a
folder since the last sync of that folder. Anything between the two may survive, or not, or in part.
"""

from __future__ import annotations

import errno
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from configs.durable import Content, Disk


class PowerLossError(BaseException):
    """The machine has lost its power; nothing of the process goes on."""


class _File:
    """A file's mode, and its synced content; None while it was never synced."""

    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.synced: bytes | None = None


class _Folder:
    """A folder's names at its last sync."""

    def __init__(self) -> None:
        self.synced: dict[str, _File | _Folder] = {}


Node: TypeAlias = _File | _Folder


@dataclass
class FaultyDisk(Disk):
    """The files below one folder."""

    root: Path
    rng: random.Random
    loses_power_after: int | None = None
    """Operations until then."""
    lies: float = 0.0
    """Share of syncs that return and have synced nothing, as with a volatile cache."""
    is_full: bool = False
    operations: int = 0
    nodes: dict[Path, Node] = field(default_factory=dict)
    """What has a name now."""

    def __post_init__(self) -> None:
        self.nodes[self.root] = _Folder()

    def write(self, path: Path, content: Content, mode: int = 0o666) -> None:
        content = content if isinstance(content, bytes) else b"".join(content)
        self._count()
        if self.is_full:
            super().write(path, content[: len(content) // 2], mode)
            self.nodes[path] = _File(mode)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().write(path, content, mode)
        self.nodes[path] = _File(mode)

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        self._count()
        super().make_folder(path, mode)
        self.nodes[path] = _Folder()

    def sync(self, path: Path) -> None:
        self._count()
        if self.lies and self.rng.random() < self.lies:
            return
        node = self.nodes[path]
        if isinstance(node, _File):
            node.synced = path.read_bytes()
        else:
            node.synced = self._names(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)
        for path in [path for path in self.nodes if path == source or source in path.parents]:
            self.nodes[target / path.relative_to(source)] = self.nodes.pop(path)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)
        for gone in [gone for gone in self.nodes if gone == path or path in gone.parents]:
            del self.nodes[gone]

    def rot(self, path: Path) -> None:
        """One bit of a file flips, unnoticed."""
        content = bytearray(path.read_bytes())
        if content:
            content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(content)

    def lose_power(self, *, worst: bool = False) -> None:
        """Leave what survives: all that was synced, and of the rest whatever chance decides.

        Args:
            worst: Nothing that was not synced survives.
        """
        root = self.nodes[self.root]
        assert isinstance(root, _Folder)
        left = self._surviving(self.root, root, worst=worst)
        shutil.rmtree(self.root)
        self.nodes = {}
        self._restore(self.root, left)

    def _surviving(self, path: Path, folder: _Folder, *, worst: bool) -> dict[str, object]:
        names, now = dict(folder.synced), self._names(path)
        moved: dict[int, bool] = {}  # a rename within a folder survives as a whole, or not at all
        for name in sorted({*names, *now}):
            before, after = names.get(name), now.get(name)
            if before is not after and not worst:
                key = id(after or before)
                if moved.setdefault(key, self.rng.random() < 0.5):
                    names.pop(name, None)
                    if after is not None:
                        names[name] = after
        places = {id(node): place for place, node in self.nodes.items()}
        found: dict[str, object] = {}
        for name, node in sorted(names.items()):
            place = places.get(id(node))
            if isinstance(node, _Folder):
                found[name] = self._surviving(place or path / name, node, worst=worst)
            else:
                found[name] = (node.mode, self._content(node, place, worst=worst))
        return found

    def _content(self, file: _File, place: Path | None, *, worst: bool) -> bytes:
        now = place.read_bytes() if place is not None else b""
        if file.synced is not None and (worst or now == file.synced or place is None):
            return file.synced
        torn = b"" if worst else now[: self.rng.randint(0, len(now))]
        return torn if self.rng.random() < 0.5 else torn + bytes(len(now) - len(torn))

    def _restore(self, path: Path, names: dict[str, object]) -> Node:
        """Write what is left; all of it is on the disk."""
        path.mkdir()
        folder = self.nodes[path] = _Folder()
        for name, left in names.items():
            if isinstance(left, dict):
                folder.synced[name] = self._restore(path / name, left)
            else:
                assert isinstance(left, tuple)
                mode, content = left
                super().write(path / name, content, mode)
                file = self.nodes[path / name] = folder.synced[name] = _File(mode)
                file.synced = content
        return folder

    def _names(self, path: Path) -> dict[str, Node]:
        return {place.name: node for place, node in self.nodes.items() if place.parent == path}

    def _count(self) -> None:
        self.operations += 1
        if self.operations == self.loses_power_after:
            raise PowerLossError
