"""Actors under fault injection: started, replaced, identified by heartbeats, their CPU time.

A live run has its `Fleet` beside `nyala up`.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from buffer import operations
from buffer.store import Store
from configs.errors import StoreError
from console.run.process import PYTHON, Command, Process
from console.run.process_guard import ProcessGuard
from console.run.run_folder import RunFolder

# --------------------------------------------------------------------------------------------------
# Processes in /proc: descendants, command lines, CPU time.

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(ancestor: int) -> dict[int, list[str]]:
    """Return the living descendants of a process: process id -> words of its command line."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(entry)
            if parent is not None:
                children[parent].append(int(entry.name))
    command_lines: dict[int, list[str]] = {}
    waiting = list(children[ancestor])
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        words = _words(pid)
        if words:
            command_lines[pid] = words
    return command_lines


def plays(role: str, words: list[str]) -> bool:
    """True for the command line of a role's process."""
    if role == "redis":
        return "redis-server" in words[0] or "valkey-server" in words[0]
    module = {"publisher": "learner.weights.publisher_process"}.get(role, role)
    return "-m" in words and module in words


class CpuTime:
    """Adds up the CPU time of a changing set of processes, including the dead.

    The time of a process after its last reading is not counted.

    Example:
        used = CpuTime()
        while runs():
            used.note(pids())
        print(used.total_s)
    """

    def __init__(self) -> None:
        self._used_s: dict[int, float] = {}

    def note(self, pids: Iterable[int]) -> None:
        """Read the CPU time of these live processes."""
        for pid in pids:
            self._used_s[pid] = max(self._used_s.get(pid, 0.0), cpu_s(pid))

    @property
    def total_s(self) -> float:
        """CPU seconds of all processes that were ever read, since they began."""
        return sum(self._used_s.values())


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used; 0 if it has ended."""
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


# --------------------------------------------------------------------------------------------------
# Actors of a run under fault injection: identified by their heartbeats in the store.

POLL_S = 0.05


@dataclass(slots=True)
class Actor:
    """One actor process and its incarnation, once the store has a heartbeat of it."""

    process: Process
    started_at: float
    incarnation: str | None = None
    serving_at: float | None = None
    """Time of its first lease, by this process's clock."""
    flags: tuple[str, ...] = field(default=())

    @property
    def pid(self) -> int:
        """Process id of the actor."""
        assert self.process.pid is not None
        return self.process.pid


class Fleet:
    """Starts, names, replaces and ends actors."""

    def __init__(
        self,
        folder: RunFolder,
        store: Store,
        guard: ProcessGuard,
        environment: Mapping[str, str],
        *,
        stop_timeout_s: float,
    ) -> None:
        self._environment = environment
        self._stop_timeout_s = stop_timeout_s
        self._folder = folder
        self._store = store
        self._guard = guard
        self._started = 0
        self.actors: list[Actor] = []
        self.gone: list[Actor] = []

    def add(self, *overrides: str, prefix: Sequence[str] = ()) -> Actor:
        """Start one more actor.

        Args:
            overrides: Settings of this actor, such as another broker.endpoint.
            prefix: Command that runs the actor, such as `ip netns exec`.
        """
        self._started += 1
        name = f"chaos-{self._started}"
        flags = tuple(text for override in overrides for text in ("--set", override))
        command = Command(
            name,
            "actor",
            (
                *prefix,
                *(*PYTHON, "actors", "--config", str(self._folder.config)),
                *("--name", name),
                *flags,
            ),
            self._folder.log(name),
            self._environment,
        )
        process = Process(command, self._guard)
        process.start()
        actor = Actor(process, time.monotonic(), flags=overrides)
        self.actors.append(actor)
        return actor

    def refill(self) -> None:
        """Replace actors that have ended, except those with settings of their own."""
        for actor in [actor for actor in self.actors if actor.process.poll() is not None]:
            self.actors.remove(actor)
            self.gone.append(actor)
            if not actor.flags:
                self.add()

    def remove(self, actor: Actor) -> None:
        """Kill an actor, which is not replaced."""
        actor.process.kill()
        if actor in self.actors:
            self.actors.remove(actor)
            self.gone.append(actor)

    def all_serve(self) -> bool:
        """Replace actors that have ended; return whether every actor has, or has had, a lease."""
        self.refill()
        self._identify()
        return all(actor.serving_at is not None for actor in self.actors)

    def _identify(self) -> None:
        """Match processes with incarnations; do nothing while the store is away."""
        if all(actor.serving_at is not None for actor in self.actors):
            return
        try:
            seen = self._store.run(operations.actors())
            holders = {task.incarnation for task in self._store.run(operations.inspect()).values()}
        except StoreError:
            return
        names = {int(actor.fields["pid"]): actor.incarnation for actor in seen}
        for actor in self.actors:
            actor.incarnation = actor.incarnation or names.get(actor.pid)
            if actor.serving_at is None and actor.incarnation in holders:
                actor.serving_at = time.monotonic()

    def close(self) -> None:
        """Ask all actors to drain, and kill those that are left after `stop_timeout_s`."""
        for actor in self.actors:
            actor.process.ask_to_stop()
        deadline = time.monotonic() + self._stop_timeout_s
        while time.monotonic() < deadline and any(
            actor.process.poll() is None for actor in self.actors
        ):
            time.sleep(POLL_S)
        for actor in self.actors:
            actor.process.kill()
