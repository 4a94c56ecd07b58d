"""Jumps of the wall clock for the processes of one run; the machine's own clock is not touched.

A small library, compiled when it is needed, is loaded into the processes and adds an offset from a
file; see `clock.c`.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lab.fault_case import Fault, FaultCase

JUMP_S = 3600
COMPILE_S = 60.0
FILE, LIBRARY = "clock", "clock.so"


@contextmanager
def shiftable(folder: Path) -> Iterator[Mapping[str, str]]:
    """Compile the library into a folder; yield the variables under which a clock can be shifted."""
    folder.mkdir(parents=True, exist_ok=True)
    library, file = folder / LIBRARY, folder / FILE
    compiler = shutil.which("cc")
    assert compiler is not None, "the fault's obstacle was checked first"
    source = Path(__file__).with_name("clock.c")
    command = (compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source))
    subprocess.run(command, check=True, timeout=COMPILE_S)
    shift(file, 0)
    yield {"LD_PRELOAD": str(library), "NYALA_CLOCK": str(file)}


def shift(file: Path, seconds: int) -> None:
    """Set the clocks that read this file to the machine's time plus `seconds`."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # In place and at once: the file is mapped into every process.
        os.pwrite(descriptor, struct.pack("=q", seconds), 0)
    finally:
        os.close(descriptor)


def offset_s(file: Path) -> int:
    """Read the offset of the clocks of this file from the machine's, seconds."""
    (seconds,) = struct.unpack("=q", file.read_bytes())
    return int(seconds)


def jump_forwards(case: FaultCase) -> None:
    """Jump ahead: every lease expires at once by Redis' clock, though its holder lives."""
    _jump(case, JUMP_S)


def jump_backwards(case: FaultCase) -> None:
    """Jump back: leases would last an hour longer, and fences must go on growing."""
    _jump(case, -JUMP_S)


def _jump(case: FaultCase, seconds: int) -> None:
    file = case.run.folder.path.parent / FILE
    case.choose()
    case.follow()
    case.inject(lambda: shift(file, offset_s(file) + seconds))
    case.recover()


def obstacle() -> str | None:
    """Return why the clock of a run cannot be shifted on this machine, or None."""
    if shutil.which("cc") is None:
        return "it needs a C compiler, to shift the clock of one run alone"
    return None


FAULTS = (
    Fault("clock-forwards", "clock jumps an hour ahead", jump_forwards, obstacle, shiftable),
    Fault("clock-backwards", "clock jumps an hour back", jump_backwards, obstacle, shiftable),
)
