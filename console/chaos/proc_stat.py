"""Processes in /proc: descendants, command lines, CPU time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(ancestor: int) -> dict[int, list[str]]:
    """Return the living descendants of a process with the words of their command lines."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(entry)
            if parent is not None:
                children[parent].append(int(entry.name))
    found: dict[int, list[str]] = {}
    waiting = list(children[ancestor])
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        words = _words(pid)
        if words:
            found[pid] = words
    return found


def plays(role: str, words: list[str]) -> bool:
    """True for the command line of a role's process."""
    if role == "redis":
        return "redis-server" in words[0] or "valkey-server" in words[0]
    module = {"publisher": "learner.weights.publisher_process"}.get(role, role)
    return "-m" in words and module in words


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


def _parent(entry: Path) -> int | None:
    try:
        # The name in parentheses may hold anything; state and parent follow it.
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):  # it has just ended
        return None
    return None if state == "Z" else int(parent)


def _words(pid: int) -> list[str]:
    try:
        text = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has just ended
        return []
    return [word for word in text.split("\0") if word]
