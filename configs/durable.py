"""Files that survive a power loss: written, synced, renamed, and the folder synced after that.

    write a hidden file -> fsync it -> rename it -> fsync its folder

A power loss at any moment leaves the old content or the new, whole. What a function here has
returned from is on the disk; what was never synced may be missing, cut short or, after a rename
whose folder was not synced, back under its old name. Everything that calls itself durable goes
through this module, and all of it through `DISK`: a simulated disk takes its place in tests.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

Content: TypeAlias = bytes | Iterable[bytes | memoryview]
"""Content of a file: whole, or in chunks."""


class Disk:
    """The operations whose order decides what is left; none of them syncs anything but `sync`."""

    def write(self, path: Path, content: Content, mode: int = 0o666) -> None:
        """Write a new file; `mode` counts from its first moment, less what the umask takes."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            for chunk in (content,) if isinstance(content, bytes) else content:
                file.write(chunk)

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Make one folder that is not there yet."""
        path.mkdir(mode)

    def sync(self, path: Path) -> None:
        """Bring the content of a file, or the names in a folder, to the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name; a file that had it is replaced."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all that is in it, if it exists."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


DISK = Disk()


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and the parents that are missing; what is there stays as it is."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):  # another process was faster
        DISK.make_folder(path, mode)
    DISK.sync(path.parent)


def make_private_folder(path: Path) -> None:
    """Make a folder that only this user can enter, or close the one that is there."""
    make_folder(path, mode=0o700)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:  # made by hand
        path.chmod(0o700)


@contextmanager
def removed_if_unwritten(unfinished: Path, *, errors: type[Exception] = OSError) -> Iterator[None]:
    """Remove a file or folder if the block that writes it fails; the error goes on.

    Its first part would keep a full disk full.
    """
    try:
        yield
    except errors:
        DISK.remove(unfinished)
        raise


def replace_file(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Write a file whole, or replace it; its folder is made if it is missing.

    Raises:
        OSError: The disk is full or failed; an old file is as it was.
    """
    make_folder(path.parent)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    DISK.remove(unfinished)  # of an earlier process with our number
    with removed_if_unwritten(unfinished):
        DISK.write(unfinished, content.encode() if isinstance(content, str) else content, mode)
        DISK.sync(unfinished)
        move(unfinished, path)


def move(source: Path, target: Path) -> None:
    """Rename a file or folder whose content is synced; a file of the new name is replaced."""
    DISK.rename(source, target)
    DISK.sync(target.parent)
    if source.parent != target.parent:
        DISK.sync(source.parent)


def sync_tree(folder: Path) -> None:
    """Sync all files in a folder and its sub-folders, and their names."""
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            DISK.sync(path)
    DISK.sync(folder)


@contextmanager
def private_files() -> Iterator[None]:
    """Make files in the block that only this user writes, and only its group may read too.

    The umask of the whole process is changed meanwhile; a narrower one stays as it is.
    """
    before = os.umask(0o077)
    os.umask(before | 0o027)
    try:
        yield
    finally:
        os.umask(before)
