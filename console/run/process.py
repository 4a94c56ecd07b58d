"""One process of a run, as its parent sees it: command, log, process group, start, end.

`nyala up`, `nyala actor` with several actors, and fault injection start processes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

# --------------------------------------------------------------------------------------------------
# The log of a process, bounded: two files, of which the older is replaced when the newer is full.
#
# The process appends to an open file of its own, so that it can log without `nyala up`. A full file
# is therefore copied, then emptied: lines written in between are lost, one or two in each 16 MiB.

MAX_LOG_BYTES = 16 * 2**20  # of each of the two: weeks of a healthy process


class ProcessLog:
    """A log file and the older part before it, `<name>.log.1`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> BinaryIO:
        """Open the file for a new life of the process: every write goes to its end."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.trim()
        return self._path.open("ab")

    def trim(self) -> None:
        """Move the log to its older part if the file is full; frequent calls bound its size."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size <= MAX_LOG_BYTES:
            return
        older = self._path.with_name(f"{self._path.name}.1")
        # A full disk keeps no older part; emptying the file is then all the more useful.
        with suppress(OSError), self._path.open("rb") as full, older.open("wb") as copy:
            full.seek(-MAX_LOG_BYTES, os.SEEK_END)
            copy.write(full.read(MAX_LOG_BYTES))  # and not what is written meanwhile
        with suppress(FileNotFoundError):
            os.truncate(self._path, 0)


# --------------------------------------------------------------------------------------------------
# One process that `nyala up` starts: command, log, process group, end.

PYTHON = (sys.executable, "-P", "-m")
"""Beginning of a role's command. `-P`: a folder of the user's, such as `configs/` in the working
folder, does not hide the package of that name here."""


class Supervised(Protocol):
    """A process as the supervisor sees it."""

    @property
    def name(self) -> str:
        """Unique, such as `actor-0`."""
        ...

    @property
    def role(self) -> str:
        """`redis`, `broker`, `learner`, `actor`, `teacher` or `agents`."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id of the current or last life; None before the first."""
        ...

    def start(self) -> None:
        """Begin a new life; the last one has ended."""
        ...

    @property
    def can_start(self) -> bool:
        """Whether `start` would begin the life at once."""
        ...

    def poll(self) -> int | None:
        """Return the last life's exit code, minus the signal that ended it; None while it runs.

        It is 0 before the first life. What the process started is killed when it has ended.
        """
        ...

    def ask_to_stop(self) -> None:
        """Send SIGTERM, on which the process drains or saves, and ends; does not wait for that."""
        ...

    def kill(self) -> None:
        """Kill the process and all that it started, and wait for its end; it may have ended."""
        ...


class GroupRegister(Protocol):
    """Register of process groups, which are ended if `nyala up` itself is killed."""

    def add(self, group: int) -> None:
        """Register a group that began."""
        ...

    def remove(self, group: int) -> None:
        """Remove a group that ended."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """Arguments, log and environment of a process."""

    name: str
    role: str
    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class ForkedChild:
    """A child of this process that a fork server forked, with the methods of `Popen` used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def terminate(self) -> None:
        """Ask the child to end, by SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child and its process group, if the child has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the child; return its exit code, or minus the signal that ended it.

        Raises:
            TimeoutError: The child has not ended within `timeout_s`.
        """
        if self.returncode is None:
            if timeout_s is not None and not self._ends_within(timeout_s):
                raise TimeoutError
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def _ends_within(self, timeout_s: float) -> bool:
        end = os.pidfd_open(self.pid)
        try:
            return bool(select.select([end], [], [], timeout_s)[0])
        finally:
            os.close(end)


def begin_program(command: Command, out: BinaryIO, err: BinaryIO, stdin: BinaryIO) -> ForkedChild:
    """Begin a command as a new program, in a process group of its own, with these files."""
    files = [(os.POSIX_SPAWN_DUP2, file.fileno(), n) for n, file in enumerate((stdin, out, err))]
    arguments = command.arguments
    pid = os.posix_spawn(
        arguments[0], arguments, command.environment, file_actions=files, setsid=True
    )
    return ForkedChild(pid)


class Forks(Protocol):
    """A server that begins commands as forks of a process that has imported their libraries."""

    has_room: bool
    """Whether this machine has the cores to import libraries in several processes at a time."""

    def fault(self, command: Command) -> str:
        """Return why `command` cannot be a fork; empty = it can, or no reason is known."""
        ...

    def has_decided(self, command: Command) -> bool:
        """Return whether `start` would answer at once."""
        ...

    def wait(self, command: Command) -> None:
        """Wait until `start` would answer at once."""
        ...

    def start(
        self, command: Command, out: BinaryIO, err: BinaryIO, stdin: BinaryIO | None = None
    ) -> ForkedChild | None:
        """Begin a command with these standard files; None = it has to be a new program."""
        ...


class Process:
    """A subprocess in a process group of its own, so that Ctrl-C reaches `nyala up` alone."""

    def __init__(self, command: Command, groups: GroupRegister, forks: Forks | None = None) -> None:
        self._command = command
        self._groups = groups
        self._forks = forks
        self._log = ProcessLog(command.log)
        self._child: subprocess.Popen[bytes] | ForkedChild | None = None

    @property
    def name(self) -> str:
        return self._command.name

    @property
    def role(self) -> str:
        return self._command.role

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    @property
    def can_start(self) -> bool:
        return self._forks is None or self._forks.has_decided(self._command)

    def start(self) -> None:
        with self._log.open() as log, held_back():
            fork = None if self._forks is None else self._forks.start(self._command, log, log)
            if fork is None and self._forks and (fault := self._forks.fault(self._command)):
                event = "a new program, which imports its libraries itself"
                row = {"event": event, "why": fault, "level": "info"}
                log.write(json.dumps(row).encode() + b"\n")
                log.flush()
            self._child = fork or self._new_program(log)
            self._groups.add(self._child.pid)

    def poll(self) -> int | None:
        if self._child is None:
            return 0
        self._log.trim()
        if self._child.returncode is None and self._has_ended():
            # Its children (ranks, engine workers, the publisher) end with it. They are signalled
            # before the leader is reaped: until then no other group can have this number.
            self._signal_group(signal.SIGKILL)
            self._child.wait()
            self._groups.remove(self._child.pid)
        return self._child.returncode

    def ask_to_stop(self) -> None:
        # Only the leader gets the signal: it stops its children itself.
        if self._child is not None and self.poll() is None:
            self._child.terminate()

    def kill(self) -> None:
        if self._child is not None and self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self._child.wait()
            self._groups.remove(self._child.pid)

    def _new_program(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(self._command.environment),
            start_new_session=True,
        )

    def _has_ended(self) -> bool:
        assert self._child is not None
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._child.pid, options) is not None

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delay signals that ask for a stop: one between a fork and its record would leave an orphan.

    Python calls handlers in the main thread only; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for signal_number in arrived:
            signal.raise_signal(signal_number)
