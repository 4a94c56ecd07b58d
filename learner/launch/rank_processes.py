"""The ranks of this machine as processes: begun together, and ended together."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GRACE_S = 5.0
"""Time for ranks to end by themselves when another has: they report why, and write no more."""
TICK_S = 0.1
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of one machine among all."""

    first: int
    """Rank of its first process."""
    count: int
    size: int
    """Ranks of all machines."""


class RankProcesses:
    """Processes of `python -m learner`, one for each rank; no rank is started again alone."""

    def __init__(
        self,
        command: Sequence[str],
        share: Share,
        environment: Mapping[str, str],
        *,
        inherited: int | None = None,
    ) -> None:
        """Start them.

        Args:
            command: Of a rank.
            share: Which ranks they are.
            environment: How a rank finds the others, in addition to the present one.
            inherited: A descriptor that they keep.
        """
        self._processes = [
            subprocess.Popen(
                command,
                env={
                    **os.environ,
                    **environment,
                    "RANK": str(share.first + local),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(share.size),
                },
                pass_fds=() if inherited is None else (inherited,),
            )
            for local in range(share.count)
        ]

    def code(self) -> int | None:
        """Exit code of the first rank that failed, 0 once all ended well; None = not yet."""
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        return None if None in codes else 0

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def end(self, grace_s: float = GRACE_S) -> None:
        """Wait for all ranks to end, and kill those that have not in time."""
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and None in [p.poll() for p in self._processes]:
            time.sleep(TICK_S)
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()


def rank_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a rank."""
    return [sys.executable, "-P", "-m", "learner", *arguments]


def die_with_launcher() -> None:
    """Ask for SIGKILL when the launcher of this rank dies (Linux): others start in its place."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
