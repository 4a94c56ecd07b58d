"""Growth of the processes of a run, from samples of /proc, and what they leave in /dev/shm.

A role's processes die and are replaced under faults, and each begins small. So a slope is measured
within the lives of processes and pooled over them. The first minutes of a life, when caches fill,
do not count.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configs.markdown import table
from configs.worker import Worker

EVERY_S = 5.0
WARM_UP_S = 120.0
ENOUGH_S = 180.0
"""Time beyond the warm-up that a slope needs."""
MOST_KB_PER_MIN = 1024.0
MOST_DESCRIPTORS_PER_MIN = 0.5
PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024
LISTENING = "0A"
SHARED = Path("/dev/shm")  # noqa: S108 - looked at only
STOP_S = 30.0

Line = list[tuple[float, float]]
"""Seconds and values of one process."""
Processes = Mapping[int, str]
"""Ids of processes and the roles that they play."""


@dataclass(frozen=True, slots=True)
class ResourceCounts:
    """Counts over all processes of a run at one moment."""

    processes: int
    ports: int
    """Listening sockets."""
    shared: int
    """Entries of /dev/shm that the processes use."""


@dataclass(frozen=True, slots=True)
class RoleGrowth:
    """The growth of one role's processes."""

    role: str
    lives: int
    warm_min: float
    """Minutes of life beyond the warm-up, over all lives."""
    rss_mb: tuple[float, float, float]
    """First, last and largest sum over the processes that lived at one moment."""
    kb_per_min: float | None
    """Slope of memory; None = too little time beyond the warm-up."""
    descriptors: tuple[float, float, float]
    descriptors_per_min: float | None

    @property
    def holds(self) -> bool:
        """Whether neither memory nor descriptors grow."""
        return (self.kb_per_min or 0.0) <= MOST_KB_PER_MIN and (
            self.descriptors_per_min or 0.0
        ) <= MOST_DESCRIPTORS_PER_MIN


@dataclass(slots=True)
class ResourceSampler:
    """Samples of the processes of a run, taken in a thread of its own."""

    processes: Callable[[], Processes]
    rss_kb: dict[tuple[str, int], Line] = field(default_factory=lambda: defaultdict(list))
    descriptors: dict[tuple[str, int], Line] = field(default_factory=lambda: defaultdict(list))
    _stop: threading.Event = field(default_factory=threading.Event)
    _worker: Worker | None = None

    def start(self) -> None:
        """Begin to sample in a thread."""
        self._worker = Worker(self._sample_until_stopped, name="growth").start()

    def stop(self) -> None:
        """Take no more samples."""
        self._stop.set()
        if self._worker is not None:
            self._worker.join(STOP_S)

    def sample(self, now: float) -> None:
        """Sample all processes once."""
        for pid, role in self.processes().items():
            with suppress(OSError):  # it has just ended
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                count = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
                self.rss_kb[role, pid].append((now, float(pages * PAGE_KB)))
                self.descriptors[role, pid].append((now, float(count)))

    def by_role(self) -> list[RoleGrowth]:
        """Sum up each role."""
        roles = sorted({role for role, _ in self.rss_kb})
        return [self._growth_of(role) for role in roles]

    def _growth_of(self, role: str) -> RoleGrowth:
        memory = [line for (of, _), line in self.rss_kb.items() if of == role]
        open_files = [line for (of, _), line in self.descriptors.items() if of == role]
        sizes = tuple(round(value / 1024, 1) for value in _ends(memory))
        return RoleGrowth(
            role=role,
            lives=len(memory),
            warm_min=round(warm_s(memory) / 60, 1),
            rss_mb=(sizes[0], sizes[1], sizes[2]),
            kb_per_min=slope_per_min(memory),
            descriptors=_ends(open_files),
            descriptors_per_min=slope_per_min(open_files),
        )

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.sample(time.monotonic())


def slope_per_min(lives: Iterable[Line]) -> float | None:
    """Fit one slope, per minute, to all lives, each with a level of its own.

    None if lives beyond their warm-up are shorter than three minutes together.
    """
    warm = [kept for kept in map(_after_warm_up, lives) if len(kept) > 1]
    if sum(line[-1][0] - line[0][0] for line in warm) < ENOUGH_S:
        return None
    above = below = 0.0
    for line in warm:
        mid = sum(at for at, _ in line) / len(line)
        level = sum(value for _, value in line) / len(line)
        above += sum((at - mid) * (value - level) for at, value in line)
        below += sum((at - mid) ** 2 for at, _ in line)
    return round(60.0 * above / below, 2)


def warm_s(lives: Iterable[Line]) -> float:
    """Add up the seconds that lives lasted beyond their warm-up."""
    return sum(line[-1][0] - line[0][0] for line in map(_after_warm_up, lives) if line)


def _after_warm_up(line: Line) -> Line:
    return [point for point in line if point[0] - line[0][0] >= WARM_UP_S]


def _ends(lives: Sequence[Line]) -> tuple[float, float, float]:
    """Return the first, the last and the largest sum over the processes of one moment."""
    sums: defaultdict[float, float] = defaultdict(float)
    for line in lives:
        for at, value in line:
            sums[at] += value
    moments = sorted(sums)
    return sums[moments[0]], sums[moments[-1]], max(sums.values())


def count_resources(pids: Iterable[int]) -> ResourceCounts:
    """Count these processes, their listening sockets and their entries of /dev/shm."""
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    links = {link for pid in alive for link in _links(pid)}
    listening = sum(f"socket:[{inode}]" in links for inode in _listening())
    shared = {name for pid in alive for name in shared_names(pid)}
    return ResourceCounts(len(alive), listening, len(shared))


def shared_names(pid: int) -> set[str]:
    """Return the entries of /dev/shm in which a process has files mapped or open."""
    paths = list(_links(pid))
    with suppress(OSError):  # it has just ended
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        paths += [line.split(None, 5)[-1] for line in lines if f" {SHARED}/" in line]
    there = [Path(path) for path in paths if not path.endswith("(deleted)")]
    return {path.relative_to(SHARED).parts[0] for path in there if SHARED in path.parents}


def orphaned_entries(before: set[str]) -> set[str]:
    """Return the entries of /dev/shm that are new since `before` and that no process uses."""
    new = {path.name for path in SHARED.iterdir()} - before
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return new - {name for pid in pids for name in shared_names(pid)} if new else set()


def processes_of(folder: Path) -> list[int]:
    """List the live processes that have a folder on their command lines."""
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
    return [pid for pid in pids if pid != os.getpid()]


def markdown(rows: Sequence[RoleGrowth]) -> str:
    """Write the roles as a table."""
    head = ("role", "lives", "warm min", "RSS, MiB", "kB/min", "descriptors", "per min")
    lines = []
    for row in rows:
        memory = " → ".join(f"{value:g}" for value in row.rss_mb[:2])
        files = " → ".join(f"{value:g}" for value in row.descriptors[:2])
        lines.append(
            (
                *(row.role, f"{row.lives}", f"{row.warm_min:g}"),
                *(f"{memory}, at most {row.rss_mb[2]:g}", _number(row.kb_per_min)),
                *(f"{files}, at most {row.descriptors[2]:g}", _number(row.descriptors_per_min)),
            )
        )
    return table(head, lines) + "\n"


def as_json(rows: Sequence[RoleGrowth]) -> list[dict[str, object]]:
    """Write the roles for a program."""
    return [asdict(row) for row in rows]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def _links(pid: int) -> set[str]:
    targets = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                targets.add(str(link.readlink()))
    return targets


def _listening() -> list[str]:
    """Return the inodes of the TCP sockets that listen."""
    inodes = []
    for protocol in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING:
                    inodes.append(words[9])
    return inodes
