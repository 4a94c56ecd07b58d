"""A CUDA runtime that registers nothing, and remembers what it was asked for.

It answers as the real one does (CUDA Runtime API, cudaHostRegister): an error for memory that is
registered already, for what was not, and for memory without write access that is not said to be so.
"""

import mmap
from pathlib import Path

from broker.weights.host_pins import READ_ONLY, HostPins

SUCCESS, INVALID, REFUSED, ALREADY, NOT_REGISTERED = 0, 1, 2, 712, 713


class FakeCudart:
    """Registered ranges of this process, by address."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.num_registered = self.num_forgotten = 0
        self.refuses = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> int:
        if self.refuses:
            return REFUSED
        if address in self.registered:
            return ALREADY
        if address % mmap.PAGESIZE or ("w" in access_of(address)) is (flags == READ_ONLY):
            return INVALID
        self.registered[address] = num_bytes
        self.num_registered += 1
        return SUCCESS

    def cudaHostUnregister(self, address: int, /) -> int:
        return SUCCESS if self.registered.pop(address, None) is not None else NOT_REGISTERED

    def forget_error(self) -> None:
        self.num_forgotten += 1

    def pins(self) -> HostPins:
        return HostPins(self, forget_error=self.forget_error)


def access_of(address: int) -> str:
    """Access to a mapping of this process, as the kernel has it; only shared ones are right."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_ = line.split()
        first, last = (int(end, 16) for end in place.split("-"))
        if first <= address < last:
            assert access.endswith("s"), f"of {line} a copy would be registered"
            return access
    raise AssertionError("not mapped")
