"""The memory that a step frees, kept for the next one instead of given back to the kernel.

glibc gives the end of its heap back once some megabytes of it are free, and the kernel clears each
page anew when it is next touched: thousands of them in each step of a small model.
"""

from __future__ import annotations

import ctypes
import os

TRIM, MMAP = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of <malloc.h>."""
MOST_KEPT = 2**28
"""Bytes at the end of the heap that may stay free."""
LARGEST = 2**25
"""Bytes of the largest block that comes from the heap, which is what glibc allows."""


def keep_freed_memory() -> bool:
    """Keep it in this process; False where the C library cannot, or somebody has set it."""
    library = ctypes.CDLL(None)
    if any(name.startswith("MALLOC_") for name in os.environ) or not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(TRIM, MOST_KEPT) and library.mallopt(MMAP, LARGEST))
