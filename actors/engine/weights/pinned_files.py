"""Files of weights that a worker of vLLM keeps mapped, and registered with the CUDA driver.

A worker uses the same three slots, or the same few staging files, over and over. Each is mapped for
reading and registered at its first use, and released when its name is gone.

A card reads the pages that were there when a file was registered. A file that is truncated and
written again has other pages under the same inode, and a card would read the old ones. Neither
slots nor staging files are ever truncated (`SharedFolder.create` makes them, mappings fill them).
Should one be, the time of its last change tells, and it is registered anew. In shared memory a
mapping leaves that time alone once it has touched its pages. On a disk the time changes with every
version, so each is registered again, which takes 0.04 s for a GiB.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from broker.weights.host_pins import Cudart, HostPins
from configs.errors import WeightsError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _MappedFile:
    """A file that is mapped and registered."""

    file: int
    """Keeps the inode, so that its number stays this file's, and shows when its name is gone."""
    changed: int
    """When the file was last changed before it was registered, ns."""
    memory: mmap.mmap
    view: ctypes.Array[ctypes.c_char]
    """The same bytes for torch, which wants memory that could be written to: a write would end the
    process, and nothing here writes."""


class PinnedFiles:
    """Mapped files of this process.

    Args:
        pins: Registers memory with the CUDA driver.
    """

    def __init__(self, pins: HostPins) -> None:
        self._pins = pins
        self._mapped: dict[tuple[int, int], _MappedFile] = {}
        """Files by device and inode: a slot's path may name another learner's slot later."""

    def view(self, path: Path, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return the bytes of a file, mapped and registered at the first call for it.

        Files whose name is gone, or that were changed since, are released first.

        Raises:
            WeightsError: The file cannot be read, or has another length.
        """
        self._release_files(_is_outdated)
        try:
            status = path.stat()
            key = status.st_dev, status.st_ino
            if key not in self._mapped and status.st_size == num_bytes:
                self._mapped[key] = self._map(path, num_bytes)
        except OSError as error:
            raise WeightsError(
                f"staged weights must be a readable file, got {path}: {error}; start the "
                "actor again: it then pulls them again"
            ) from error
        if status.st_size != num_bytes:
            raise WeightsError(
                f"{path} must hold {num_bytes} bytes, got {status.st_size}; start the actor again: "
                "it then pulls the version again"
            )
        return self._mapped[key].view

    def close(self) -> None:
        """Unmap and unregister all files."""
        self._release_files(lambda _: True)

    def _map(self, path: Path, num_bytes: int) -> _MappedFile:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            changed = os.fstat(file).st_ctime_ns
            memory = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
            refusal = self._pins.pin(memory, is_read_only=True)
        except BaseException:
            os.close(file)
            raise
        if refusal:
            log.warning("weights are copied slowly: %s", refusal)
        return _MappedFile(file, changed, memory, _view_of(memory))

    def _release_files(self, is_released: Callable[[_MappedFile], bool]) -> None:
        for key, mapped in tuple(self._mapped.items()):
            if is_released(mapped):
                del self._mapped[key]
                self._pins.unpin(mapped.memory)
                os.close(mapped.file)


def _is_outdated(mapped: _MappedFile) -> bool:
    """Whether a file's name is gone, or its pages may no longer be those that were registered."""
    status = os.fstat(mapped.file)
    return status.st_nlink == 0 or status.st_ctime_ns != mapped.changed


def pinned_files(device: torch.device) -> PinnedFiles:
    """Make the pinned files of a card."""

    def forget_error() -> None:
        with suppress(RuntimeError):  # a kernel, after whose start torch takes the error
            torch.ones(1, device=device)

    return PinnedFiles(HostPins(cast("Cudart", torch.cuda.cudart()), forget_error=forget_error))


def _view_of(memory: mmap.mmap) -> ctypes.Array[ctypes.c_char]:
    address = np.frombuffer(memory, np.uint8).ctypes.data
    view = (ctypes.c_char * len(memory)).from_address(address)
    view.memory = memory  # type: ignore[attr-defined]  # lives as long as tensors over it
    return view
