"""A guard process that ends what a killed command had started, then ends itself.

`nyala up`, `nyala actor` with several actors, the fork server and the Python API each start one.

Run as `python -m console.run.process_guard SECONDS`, it reads `+group` and `-group` lines on stdin.
The end of stdin means that the command is gone: the leader of every remaining group gets SIGTERM.
Once a leader has ended, and after SECONDS at the latest, what is left of its group gets SIGKILL.
Nothing else ends the guard, not even a SIGTERM to all processes of the machine. What killed
processes leave in shared memory is removed. A pipe serves better than a parent-death signal: it
ends however the command dies, and a guard also ends processes that ignore SIGTERM and their
descendants.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from broker.weights.shared_memory import sweep

POLL_S = 0.05
KILLED_S = 5.0  # time for the kernel to release what a killed process held


class ProcessGuard:
    """The side of the command: starts the guard and sends it process groups."""

    def __init__(self, *, grace_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "console.run.process_guard", str(grace_s)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # neither Ctrl-C nor a kill of this process group reaches it
        )

    def add(self, group: int) -> None:
        """Have a process group ended when this process ends or calls `close`."""
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group that has ended."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Let the guard end the remaining groups, then itself, and wait until it has.

        That takes `grace_s` and 5 s at most, and is at once if no group is left.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def follow(lines: Iterable[str]) -> set[int]:
    """Return the groups that were added and not removed when the lines end."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        groups = groups | {group} if line.startswith("+") else groups - {group}
    return groups


def end_all(groups: set[int], *, grace_s: float) -> None:
    """Ask the leaders to stop, then kill what is left of each group.

    A group is killed when its leader has ended, or after `grace_s`. What they leave in shared
    memory is removed.
    """
    deadline = time.monotonic() + grace_s
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)
    while groups and time.monotonic() < deadline:
        groups = {group for group in groups if _lives(group)}
        time.sleep(POLL_S)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    while any(map(_lives, groups)) and time.monotonic() < deadline + KILLED_S:
        time.sleep(POLL_S)
    sweep()


def _lives(group: int) -> bool:
    """True while the leader lives; once it has ended, the rest of its group is killed."""
    if _runs(group):
        return True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return False


def _runs(pid: int) -> bool:
    """True until a process has ended, even if no parent has waited for it.

    Its parent was the command. The process that adopts it may wait for it late, and the first
    process of a container may never do so.
    """
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # no /proc, or the process has just ended: the next call sees that
        return True
    return status.rpartition(")")[2].split()[0] != "Z"


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_all(follow(sys.stdin), grace_s=float(sys.argv[1]))
