"""Launcher of the learner: number, place and processes of this machine's ranks, without torch.

`python -m learner` calls it to start several ranks here; `several_machines.py` builds on it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog

from configs.errors import SettingsError
from configs.settings import LearnerSettings, RunSettings, Settings
from configs.validation.learner import layout_of
from configs.weight_path import is_loopback
from learner.model.rendezvous import RENDEZVOUS_FILE, interfaces

# --------------------------------------------------------------------------------------------------
# The ranks of this machine as processes: begun together, and ended together.

GRACE_S = 5.0
"""Time for ranks to end by themselves when another has: they report why, and write no more."""
TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class MachineRanks:
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
        share: MachineRanks,
        environment: Mapping[str, str],
        *,
        inherited: int | None = None,
    ) -> None:
        """Start the processes of these ranks.

        Args:
            command: Command of a rank.
            share: The ranks that are started.
            environment: Variables that tell a rank where the others are, besides the present ones.
            inherited: A descriptor that the processes inherit.
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
        """Exit code of the lowest rank that failed, 0 once all ended well; None = not yet.

        A rank that a signal ended has 128 + the number of the signal.
        """
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

    def end_processes(self, grace_s: float = GRACE_S) -> None:
        """Wait for all ranks to end, and kill those that have not in time."""
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and None in [p.poll() for p in self._processes]:
            time.sleep(TICK_S)
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()


def rank_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a rank: `python -m learner` with these arguments."""
    return [sys.executable, "-P", "-m", "learner", *arguments]


# --------------------------------------------------------------------------------------------------
# The machines of a learner, and where its ranks meet.

JOIN_S = 600.0
"""Longest wait for nodes that are needed: machines may start minutes apart."""
REJOIN_S = 30.0
"""Wait for nodes that can be done without."""


class Rendezvous(NamedTuple):
    """Where the ranks of one start meet, from the view of one machine."""

    share: MachineRanks
    host: str
    port: int
    own_address: str
    """Address of this machine, on the network of the others."""
    listener: socket.socket | None = None
    """On the machine of rank 0: the socket on which its store listens."""


StartRanks = Callable[[Rendezvous], RankProcesses]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines, as each of them is told on its command line."""

    number: int
    """Number of machines."""
    node: int
    """Number of this machine, from 0."""
    host: str
    port: int
    """Where node 0 listens."""
    ranks: Callable[[], int]
    """Counts the ranks of this machine."""
    min_ranks: int | None = None
    """Fewest to go on with; None = all."""
    fits: Callable[[int], bool] = lambda _: True
    """Whether so many ranks can be divided as `parallel` says."""
    rejoin_s: float = REJOIN_S


def check_nodes(run: RunSettings, number: int, node: int, rendezvous: str) -> tuple[str, int]:
    """Check the nodes on the command line; return host and port of node 0.

    Raises:
        SettingsError: The nodes cannot meet there, or others could join them.
    """
    host, _, port = rendezvous.rpartition(":")
    if not 0 <= node < number:
        raise SettingsError(
            f"--node-rank must be from 0 to --nodes - 1 = {number - 1}, got {node}; give each "
            f"machine its own number, and 0 to the one that has the address of --rendezvous"
        )
    if not host or not port.isdigit():
        raise SettingsError(
            f"--rendezvous must be the host:port at which node 0 listens, got {rendezvous!r}; "
            f"choose an address of node 0 that the others reach, and a free port"
        )
    if not run.trusted_network and not is_loopback(f"tcp://{rendezvous}"):
        raise SettingsError(
            f"--rendezvous must be on loopback where run.trusted_network is false, got "
            f"{rendezvous}; whoever reaches a process group can read and write weights: set "
            f"run.trusted_network to true if nobody else is on that network"
        )
    return host, int(port)


# --------------------------------------------------------------------------------------------------
# Number of ranks that this machine can run: fewer than asked for where GPUs are gone.

COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
COUNT_S = 120.0  # torch is imported, and the driver may have to be woken


def fits_of(settings: Settings) -> Callable[[int], bool]:
    """Return a function that says whether so many ranks can be divided as `parallel` asks."""

    def fits(ranks: int) -> bool:
        try:
            layout_of(settings.parallel, ranks)
        except SettingsError:
            return False
        return True

    return fits


def usable_ranks(
    learner: LearnerSettings,
    fits: Callable[[int], bool] = lambda _: True,
    *,
    has_other_nodes: bool = False,
) -> int:
    """Count the ranks that can be started here; fewer than asked only with `learner.min_ranks`.

    With `learner.min_ranks` the GPUs that work are counted in a process of its own.

    Args:
        learner: Says how many there should be, and on what.
        fits: Whether so many can be divided as `parallel` says.
        has_other_nodes: Whether other machines have ranks too, which `learner.min_ranks` counts.

    Raises:
        SettingsError: There are too few GPUs.
    """
    if learner.min_ranks is None or learner.device == "cpu":
        return learner.ranks
    least = 1 if has_other_nodes else learner.min_ranks
    gpus = _count_gpus()
    if not gpus and learner.device == "auto":
        return learner.ranks
    for ranks in range(min(gpus, learner.ranks), 0, -1):
        if ranks >= least and fits(ranks):
            return ranks
    raise SettingsError(
        f"this machine must have working GPUs for at least {least} rank(s) of the learner, in a "
        f"number that parallel divides, got {gpus}; repair the others (`nvidia-smi` lists those "
        f"that work), or lower learner.min_ranks or the sizes in parallel"
    )


def _count_gpus() -> int:
    try:
        counted = subprocess.run(
            [sys.executable, "-c", COUNT_GPUS],
            capture_output=True,
            text=True,
            timeout=COUNT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SettingsError(
            f"the driver of this machine must tell its GPUs within {COUNT_S:g} s, got no answer; "
            "look at `nvidia-smi`, or unset learner.min_ranks, with which GPUs are not counted"
        ) from None
    return int(counted.stdout) if counted.returncode == 0 else 0


# --------------------------------------------------------------------------------------------------
# Several ranks on one machine, which listen on loopback alone.
#
# They meet through a file in a private folder, and gloo and NCCL use the loopback interface,
# unless a person has set another. A TCP store, which torchrun would start, listens on every
# interface.

log = structlog.get_logger()


def launch(arguments: list[str], *, ranks: int, stopping: threading.Event) -> int:
    """Run `python -m learner <arguments>` as `ranks` processes until all of them have ended.

    No rank is restarted alone: whoever started this starts all again, at the newest checkpoint.
    Once `stopping` is set, every rank gets SIGTERM, and this waits without a limit.

    Returns:
        0 if all ended well, else the exit code of a rank that failed. The other ranks are killed
        if they have not ended `GRACE_S` later.
    """
    folder = Path(tempfile.mkdtemp(prefix="nyala-ranks-"))
    environment = {
        RENDEZVOUS_FILE: str(folder / "ranks"),
        **interfaces("lo", os.environ),
    }
    processes = RankProcesses(rank_command(arguments), MachineRanks(0, ranks, ranks), environment)
    try:
        while (code := processes.code()) is None:
            if stopping.wait(TICK_S):
                processes.signal(signal.SIGTERM)  # rank 0 checkpoints, and all end
                while (code := processes.code()) is None:
                    time.sleep(TICK_S)
                break
        if code:
            log.error("a rank failed", exit_code=code)
        return code
    finally:
        processes.end_processes()
        shutil.rmtree(folder, ignore_errors=True)
