"""Files of weights that a worker of vLLM keeps mapped, and registered with the CUDA driver.

A worker meets the same three slots, or the same few staging files, over and over. Each is mapped
for reading and registered when it is met first, and let go of when its name is gone.

A card reads the pages that were there when they were registered. A file that is cut off and written
again has others, under the same inode, and a card would read the old ones. Neither slots nor
staging files are ever cut off (`SharedFolder.create` makes them, mappings fill them). One that is
all the same shows by the time of its last change, and is registered anew: a mapping in shared
memory leaves that time alone once it has touched its pages. On a disk it passes with every version,
so there each is registered again, which takes 0.04 s for a GiB.
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
class _Mapped:
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
        pins: Registers them.
    """

    def __init__(self, pins: HostPins) -> None:
        self._pins = pins
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        """By device and inode: a slot's path may name another learner's slot later."""

    def view(self, path: Path, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return the bytes of a file.

        Raises:
            WeightsError: It cannot be read, or has another length.
        """
        self._let_go(_is_another)
        try:
            found = path.stat()
            key = found.st_dev, found.st_ino
            if key not in self._mapped and found.st_size == num_bytes:
                self._mapped[key] = self._map(path, num_bytes)
        except OSError as error:
            raise WeightsError(
                f"staged weights must be a readable file, got {path}: {error}; pull them again"
            ) from error
        if found.st_size != num_bytes:
            raise WeightsError(
                f"{path} must hold {num_bytes} bytes, got {found.st_size}; pull the version again"
            )
        return self._mapped[key].view

    def close(self) -> None:
        """Let go of all."""
        self._let_go(lambda _: True)

    def _map(self, path: Path, num_bytes: int) -> _Mapped:
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
        return _Mapped(file, changed, memory, _view_of(memory))

    def _let_go(self, of: Callable[[_Mapped], bool]) -> None:
        for key, mapped in tuple(self._mapped.items()):
            if of(mapped):
                del self._mapped[key]
                self._pins.unpin(mapped.memory)
                os.close(mapped.file)


def _is_another(mapped: _Mapped) -> bool:
    """Whether a file's name is gone, or its pages may no longer be those that were registered."""
    found = os.fstat(mapped.file)
    return found.st_nlink == 0 or found.st_ctime_ns != mapped.changed


def pinned_files(device: torch.device) -> PinnedFiles:
    """Make them for a card."""

    def forget_error() -> None:
        with suppress(RuntimeError):  # a kernel, after whose start torch takes the error
            torch.ones(1, device=device)

    return PinnedFiles(HostPins(cast("Cudart", torch.cuda.cudart()), forget_error=forget_error))


def _view_of(memory: mmap.mmap) -> ctypes.Array[ctypes.c_char]:
    address = np.frombuffer(memory, np.uint8).ctypes.data
    view = (ctypes.c_char * len(memory)).from_address(address)
    view.memory = memory  # type: ignore[attr-defined]  # lives as long as tensors over it
    return view
