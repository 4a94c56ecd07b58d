"""Keeper of one agent: a program that starts it, and ends all its processes when the host is gone.

    python -I -S keeper.py FOLDER GRACE_S STDIN COMMAND ...

Runs COMMAND in FOLDER, with the open file STDIN as its standard input (-1 = none), and exits with
its code (128 + the signal that ended it). When the command has ended, or standard input ends, every
process that descends from it is ended, those that left its session too: orphans come to the keeper,
which is their subreaper. Then FOLDER is removed. Standard input is a pipe of the host, so it ends
however the host dies. A command that cannot be started ends the keeper by the signal `NOT_STARTED`.

Two processes keep the command, `host -> guard -> keeper -> COMMAND`: whichever is killed, the other
ends everything. Where both are killed at once, the kernel ends the command, but not what it began.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.02
KILLED_S = 5.0  # a process that the kernel cannot end does not keep the keeper
CHANGED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGCHLD,
    signal.SIGPIPE,  # which Python ignores, as the next one
    signal.SIGXFSZ,
)
NOT_STARTED = signal.SIGUSR1
"""A signal, because a command may exit with any code."""


def parents_of_processes() -> dict[int, int]:
    """Return the parent of each process of this machine that has not ended."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            except OSError:  # it has just ended
                continue
            if state != b"Z":
                parents[int(folder.name)] = int(parent)
    return parents


def descendants(root: int, parents: dict[int, int]) -> set[int]:
    """Return the processes below one."""
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {root}


def end_all(grace_s: float) -> None:
    """Ask the processes below this one to end, then kill those that remain."""
    begin = time.monotonic()
    asked: set[int] = set()
    while has_children() and time.monotonic() < begin + grace_s:
        alive = descendants(os.getpid(), parents_of_processes())
        ask(alive - asked)
        asked |= alive
        time.sleep(POLL_S)
    killed: set[int] = set()
    changed_at = time.monotonic()
    while has_children() and time.monotonic() < changed_at + KILLED_S:
        # Children alone, at once: those of a killed process become this one's, and a process that
        # forks and exits over and over has another number before a list of all could be read.
        children = children_of_this()
        kill(children)
        if children == killed:
            time.sleep(POLL_S)
        else:
            killed, changed_at = children, time.monotonic()


def has_children() -> bool:
    """Reap those that have ended; whether others are left, and so any process below this one."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def children_of_this() -> set[int]:
    """Return the children of this process; where the kernel has no list of them, all below it."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return descendants(os.getpid(), parents_of_processes())


def ask(processes: Iterable[int]) -> None:
    """Send SIGTERM to processes that may have ended."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)


def kill(processes: Iterable[int]) -> None:
    """Kill processes with their groups, which the kernel does before one of these can fork."""
    groups: set[int] = set()
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            groups.add(os.getpgid(pid))
            os.kill(pid, signal.SIGKILL)
    for group in groups - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def become_keeper() -> int:
    """Take in orphans of all processes below; return a pipe with a byte for each child's end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return woken


def start(folder: str, stdin: int, command: list[str]) -> int:
    """Start a command in a session of its own; return its process id.

    Raises:
        OSError: It cannot be started.
    """
    failed, fails = os.pipe()  # which the start of the command closes
    pid = os.fork()
    if not pid:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
            os.setsid()
            os.chdir(folder)
            stdin = os.open(os.devnull, os.O_RDONLY) if stdin < 0 else stdin
            os.dup2(stdin, 0)
            os.close(stdin)
            signal.set_wakeup_fd(-1)
            for number in CHANGED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)  # noqa: S606 - the user's command, without a shell
        except OSError as error:
            os.write(fails, str(error.errno).encode())
        os._exit(127)
    os.close(fails)
    with os.fdopen(failed, "rb") as pipe:
        if errno := pipe.read():
            raise OSError(int(errno), os.strerror(int(errno)))
    return pid


def wait(
    child: int, woken: int, lifeline: int | None = None, timeout_s: float | None = None
) -> int | None:
    """Wait for a child; return its code, negative for a signal.

    Args:
        child: Its process id.
        woken: Pipe of `become_keeper`.
        lifeline: Pipe that ends when this process has to end the child.
        timeout_s: Longest time between ends of children; None = no limit.

    Returns:
        None where the pipe or the time has ended.
    """
    pipes = [woken] if lifeline is None else [woken, lifeline]
    while True:
        ready = select.select(pipes, [], [], timeout_s)[0]
        if woken in ready:
            os.read(woken, 4096)
        code = reap().get(child)
        if code is not None or not ready or (lifeline in ready and not os.read(lifeline, 4096)):
            return code


def reap() -> dict[int, int]:
    """Return the exit codes of children that have ended."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if not pid:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def keep(folder: str, grace_s: float, stdin: int, command: list[str], lifeline: int) -> int:
    """Keep a command until it ends, or the guard does; return its code."""
    woken = become_keeper()
    try:
        pid = start(folder, stdin, command)
    except OSError as error:
        return not_started(command, error)
    if stdin >= 0:
        os.close(stdin)  # so that the host sees when the command has ended
    code = wait(pid, woken, lifeline)
    end_all(0.0 if code is not None else grace_s)
    if code is None:
        code = -signal.SIGTERM
    return code if code >= 0 else 128 - code


def guard(keeper: int, grace_s: float, woken: int, held: int) -> int:
    """Wait for the keeper, or have it end its command when the host is gone; return its code."""
    code = wait(keeper, woken, 0)
    if code is None:
        os.close(held)
        code = wait(keeper, woken, timeout_s=grace_s + KILLED_S)
    end_all(0.0)
    return -signal.SIGKILL if code is None else code


def not_started(command: list[str], error: OSError) -> int:
    """Say why a command cannot be started; return the code that stands for it."""
    os.write(2, os.fsencode(f"{command[0]} cannot be started: {error.strerror}\n"))
    return -NOT_STARTED


def remove(folder: str) -> None:
    """Remove a folder with all that is in it, or what has taken its place."""
    if Path(folder).is_symlink():
        Path(folder).unlink()
        return
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # folders that may not be written, or a thousand in one another
        os.spawnlp(os.P_WAIT, "chmod", "chmod", "-R", "u+rwX", folder)  # noqa: S606 - no shell
        os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", "--one-file-system", folder)  # noqa: S606 - no shell


def main(folder: str, grace_s: float, stdin: int, command: list[str]) -> int:
    """Keep a command, in two processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    woken = become_keeper()
    lifeline, held = os.pipe()
    try:
        keeper = os.fork()
    except OSError as error:
        code = not_started(command, error)
    else:
        if keeper:
            os.close(lifeline)
            if stdin >= 0:
                os.close(stdin)
            code = guard(keeper, grace_s, woken, held)
        else:
            os.close(held)
            code = keep(folder, grace_s, stdin, command, lifeline)
    remove(folder)
    if code == -NOT_STARTED:
        os.kill(os.getpid(), NOT_STARTED)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
