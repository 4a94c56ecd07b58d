"""Freed memory stays with the process, unless somebody has said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from learner.model import cpu

PROGRAM = """
import ctypes, sys
from learner.model.cpu import keep_freed_memory

class Info(ctypes.Structure):  # mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = library.mallinfo2()
blocks = [library.malloc(2**24) for _ in range(4)]
for block in blocks:
    library.free(block)
print(library.mallinfo2().arena - before.arena)
"""

needs_glibc = pytest.mark.skipif(
    not os.confstr("CS_GNU_LIBC_VERSION"), reason="the C library is not glibc"
)


@pytest.mark.slow
@needs_glibc
def test_what_a_step_has_freed_stays_in_the_heap_for_the_next() -> None:
    assert _still_held("keep") > 3 * 2**24  # a part of the first fits into what was free before
    assert _still_held("leave") == 0


@needs_glibc
def test_what_somebody_has_set_for_malloc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")

    assert not cpu.keep_freed_memory()


def _still_held(how: str) -> int:
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    return int(shown.stdout)
