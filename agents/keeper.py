"""Keeper of one agent: a program that starts it, and ends all its processes when the host is gone.

    python -I -S keeper.py FOLDER GRACE_S STDIN COMMAND ...

Runs COMMAND in FOLDER, with the open file STDIN as its standard input (-1 = none), and exits with
its code (128 + the signal that ended it). When the command has ended, or standard input ends, every
process that descends from it is ended, those that left its session too: orphans come to the keeper,
which is their subreaper. Then FOLDER is removed. Standard input is a pipe of the host, so it ends
however the host dies.
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
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02
KILLED_S = 5.0  # a process that the kernel cannot end does not keep the keeper


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
        send(signal.SIGTERM, alive - asked)
        asked |= alive
        time.sleep(POLL_S)
    killed: set[int] = set()
    while has_children() and time.monotonic() < begin + grace_s + KILLED_S:
        # Children alone, at once: those of a killed process become this one's, and a process that
        # forks and exits over and over has another number before a list of all could be read.
        children = children_of_this()
        send(signal.SIGKILL, children)
        if children == killed:
            time.sleep(POLL_S)
        killed = children


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


def send(number: signal.Signals, processes: set[int]) -> None:
    """Send a signal to processes that may have ended."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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
        code = os.waitstatus_to_exitcode(status)
        codes[pid] = code if code >= 0 else 128 - code


def start(folder: str, stdin: int, command: list[str]) -> int:
    """Start a command; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin < 0 else stdin, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606 - the user's command, without a shell
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def main(folder: str, grace_s: float, stdin: int, command: list[str]) -> int:
    """Keep a command until it ends, or the host does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    agent = start(folder, stdin, command)
    code = None
    try:
        while code is None:
            ready = select.select([0, woken], [], [])[0]
            if woken in ready:
                os.read(woken, 4096)
            code = reap().get(agent)
            if 0 in ready and not os.read(0, 4096):
                break
        end_all(0.0 if code is not None else grace_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 128 + signal.SIGTERM if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
