"""The card and its way to host memory: what every other figure is to be read beside."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import torch

from benchmarks.card.stage import Asked, Note, main
from broker.protocol.manifest import checksum_of, digest_of

TIMES = 3


def measure(asked: Asked, note: Note) -> None:
    """Measure products, copies with and without registered memory, and digests of it."""
    is_card = asked.device == "cuda"
    rate = round(matmul_tflops(asked.device, 512 if asked.is_tiny else 8192), 3)
    note("card", {"name": card_name(asked.device), "matmul_tflops": rate})
    num_bytes = 2**24 if asked.is_tiny else 2**30
    memory = mmap.mmap(-1, num_bytes)
    host = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=asked.device)
    rates = {"to_gb_s": lambda: there.copy_(host), "from_gb_s": lambda: host.copy_(there)}
    note("pageable", {name: gb_s(call, num_bytes) for name, call in rates.items()})
    if is_card:
        error = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), num_bytes, 0)
        torch.cuda.check_error(int(error))
        note("registered", {name: gb_s(call, num_bytes) for name, call in rates.items()})
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    digests = {
        "digest_gb_s": lambda: digest_of([memory]),
        "digest_8_threads_gb_s": lambda: digest_of([memory], threads=8),
        "checksum_gb_s": lambda: checksum_of(memory),
    }
    note("digests", {name: gb_s(call, num_bytes) for name, call in digests.items()})


def card_name(device: str) -> str:
    """Name the card as its driver does."""
    return torch.cuda.get_device_name() if device == "cuda" else "none"


def matmul_tflops(device: str, width: int, times: int = 20) -> float:
    """Measure what a product of two square matrices in bfloat16 reaches."""
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    began = now(device)
    for _ in range(times):
        a @ b
    return times * 2 * width**3 / (now(device) - began) / 1e12


def gb_s(call: Callable[[], object], num_bytes: int) -> float:
    """Return the best rate of a few, 10^9 bytes a second."""
    seconds = []
    for _ in range(1 + TIMES):
        began = now()
        call()
        seconds.append(now() - began)
    return round(num_bytes / min(seconds) / 1e9, 2)


def now(device: str = "cuda") -> float:
    """Return the time once the card has done what it was given."""
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main(measure)
