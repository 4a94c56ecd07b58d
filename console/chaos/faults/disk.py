"""A small disk for Redis, where this user may mount one, and a way to fill it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_MB = 512  # more than the log of a whole matrix
MOUNT_S = 10.0


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Put a disk in memory under a folder; nothing where that is not allowed."""
    if is_own_disk() is not None:
        yield
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=700", "tmpfs", str(folder))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def is_own_disk() -> str | None:
    """Reason why there can be no such disk; None = there can."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return "it needs root, to mount a small disk"
    return None


@contextmanager
def fill(folder: Path) -> Iterator[None]:
    """Leave no room on the disk of a folder."""
    filler = folder / "filler"
    try:
        with filler.open("wb") as file:
            _take_all(file.fileno())
        yield
    finally:
        filler.unlink()


def _take_all(file: int) -> None:
    """Take room in ever smaller pieces: the disk is in use meanwhile."""
    room, size = os.fstatvfs(file), 0
    piece = room.f_bavail * room.f_frsize
    while piece >= room.f_frsize:
        try:
            os.posix_fallocate(file, size, piece)
            size += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece //= 2


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=MOUNT_S, capture_output=True)
