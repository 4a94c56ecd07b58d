"""A private folder in shared memory for files of weights, removed with its owner.

Two processes of one machine pass weights as files here: learner and publisher (slots), actor and
engine (staging). Names cannot be guessed and only the owner may enter. A killed owner cannot clean
up, so it holds a file lock, which the kernel releases; the next owner removes unlocked folders.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from configs.errors import WeightsError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a fresh folder of mode 0700 in it, see `SharedFolder`
PREFIX = "nyala-"
HEADROOM = 1.1
"""Factor of the bytes that must be free, because torch and vLLM use shared memory too."""
SCRATCH = "NYALA_SCRATCH"
"""Variable that names this machine's folder for large temporary files, where a run's folder cannot
be written or is slow."""


def scratch(otherwise: Path) -> Path:
    """Return the folder that `NYALA_SCRATCH` names for large temporary files, else `otherwise`."""
    named = os.environ.get(SCRATCH)
    return Path(named) if named else otherwise


class SharedFolder:
    """A new folder of mode 0700: in shared memory if `num_bytes` fit, else on a disk.

    Folders of this user beside it, whose owners are dead, are removed first.

    Args:
        label: Part of the folder's name.
        num_bytes: Bytes of all files that the folder will have.
        fallback: Folder on a disk, unless `NYALA_SCRATCH` names another.

    Raises:
        WeightsError: There is no room in shared memory, and the disk cannot be written.
    """

    def __init__(self, label: str, *, num_bytes: int, fallback: Path) -> None:
        base = SHARED_MEMORY if _has_room(SHARED_MEMORY, num_bytes) else scratch(fallback)
        self.path = base / f"{PREFIX}{label}-{secrets.token_hex(8)}"
        try:
            base.mkdir(parents=True, exist_ok=True)
            sweep(base)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise WeightsError(
                f"{SHARED_MEMORY} must have {num_bytes * HEADROOM / 2**30:.1f} GiB free, or "
                f"{SCRATCH} be a folder that can be written, got {base}: {error.strerror}; enlarge "
                f"shared memory (docker: --shm-size, or --ipc=host), or set {SCRATCH}"
            ) from error
        self._lock = _hold(self.path)

    def create(self, name: str, num_bytes: int) -> Path:
        """Make a file of this length whose memory is reserved, so that writing to it cannot fail.

        Raises:
            WeightsError: There is no room.
            OSError: The folder has a file of this name, or the disk failed.
        """
        path = self.path / name
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            free = shutil.disk_usage(self.path).free
            raise WeightsError(
                f"free space in {self.path.parent} must be >= {num_bytes} bytes, got {free}; stop "
                "or delete what fills it, or enlarge it (/dev/shm of docker: --shm-size)"
            ) from error
        finally:
            os.close(file)
        return path

    def close(self) -> None:
        """Remove the folder. Mappings of its files stay valid where they are open."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> SharedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_room(base: Path, num_bytes: int) -> bool:
    return os.access(base, os.W_OK) and shutil.disk_usage(base).free > num_bytes * HEADROOM


def _hold(folder: Path) -> int:
    """Lock a file, then give it its name: a sweeper never meets one that is not yet locked."""
    unnamed = folder / "starting"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(folder / "alive")
    return lock


def sweep(base: Path | None = None) -> None:
    """Remove folders of this user whose owner is dead; by default those in shared memory.

    Raises no error for a folder that cannot be removed.
    """
    for folder in (base or SHARED_MEMORY).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "alive", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, being made, or just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its owner lives
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
