"""Processes as the kernel knows them: who descends from whom, and what a line of command says."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path


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
    """Say whether a command line is that of a role's process."""
    if role == "redis":
        return "redis-server" in words[0] or "valkey-server" in words[0]
    module = {"publisher": "learner.weights.publisher_process"}.get(role, role)
    return "-m" in words and module in words


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
