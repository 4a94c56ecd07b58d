"""Mappings of weights that are registered with the CUDA driver, so that a card copies them itself.

Used by the learner for the slots it writes, and by engines for the files they load.

Other ("pageable") memory goes through a small buffer of the driver, which a core fills while its
caller waits. Registration takes about as long as a touch of every page, so it is done once for the
life of a mapping. This module does not import torch: it gets the functions of the CUDA runtime.

Registration would copy a private mapping, which then no longer follows its file. So a mapping must
be shared, and a read-only mapping must be registered as read-only.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Protocol

import numpy as np

READ_ONLY = 8
"""`cudaHostRegisterReadOnly`: without it the driver refuses memory that cannot be written to."""


class Code(Protocol):
    """Result of a call: torch's `cudaError_t`."""

    def __int__(self) -> int: ...


class Cudart(Protocol):
    """The part of `torch.cuda.cudart()` that is used here."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> Code: ...

    def cudaHostUnregister(self, address: int, /) -> Code: ...


class HostPins:
    """Registered mappings of this process.

    Args:
        cudart: The CUDA runtime.
        forget_error: Called after a call that failed. The runtime keeps its error, and torch would
            take it for that of the next kernel.
    """

    def __init__(self, cudart: Cudart, *, forget_error: Callable[[], None]) -> None:
        self._cudart = cudart
        self._forget_error = forget_error
        self._addresses: dict[int, mmap.mmap] = {}

    def pin(self, memory: mmap.mmap, *, is_read_only: bool = False) -> str:
        """Register a shared mapping.

        Args:
            memory: The mapping; it stays mapped until `unpin`.
            is_read_only: The mapping cannot be written to.

        Returns:
            Reason of a refusal, after which copies are slow but right; empty = registered.
        """
        address = _address_of(memory)
        flags = READ_ONLY if is_read_only else 0
        code = int(self._cudart.cudaHostRegister(address, len(memory), flags))
        if code != 0:
            self._forget_error()
            return (
                f"cudaHostRegister of {len(memory)} bytes must return 0, got {code}; they are "
                "copied as pageable memory"
            )
        self._addresses[address] = memory
        return ""

    def unpin(self, memory: mmap.mmap) -> None:
        """Undo the registration of a mapping, if there is one."""
        address = _address_of(memory)
        if self._addresses.pop(address, None) is None:
            return
        if int(self._cudart.cudaHostUnregister(address)) != 0:
            self._forget_error()

    def close(self) -> None:
        """Undo all registrations of this process."""
        for memory in tuple(self._addresses.values()):
            self.unpin(memory)


def _address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
