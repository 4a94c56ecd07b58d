"""CPU seconds of processes that come and go, as the kernel counts them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuTime:
    """Adds up what a changing set of processes has used, the dead included.

    What a process used after the last look at it is not counted.

    Example:
        used = CpuTime()
        while runs():
            used.note(pids())
        print(used.total_s)
    """

    def __init__(self) -> None:
        self._used_s: dict[int, float] = {}

    def note(self, pids: Iterable[int]) -> None:
        """Look at the processes that live now."""
        for pid in pids:
            self._used_s[pid] = max(self._used_s.get(pid, 0.0), cpu_s(pid))

    @property
    def total_s(self) -> float:
        """CPU seconds of all processes that were ever looked at, since they began."""
        return sum(self._used_s.values())


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used; 0 if it has ended."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(stat[11]) + int(stat[12])) / TICKS_PER_S
