"""The machines of a learner, and where its ranks meet."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from configs.errors import SettingsError
from configs.settings import RunSettings
from configs.weight_path import is_loopback

from .rank_processes import RankProcesses, Share

JOIN_S = 600.0
"""Longest wait for nodes that are needed: machines may start minutes apart."""
REJOIN_S = 30.0
"""Wait for nodes that can be done without."""


class Meeting(NamedTuple):
    """Where the ranks of a start meet, as one machine sees it."""

    share: Share
    host: str
    port: int
    own_address: str
    """Of this machine, on the network of the others."""
    listener: socket.socket | None = None
    """On the machine of rank 0: where its store listens."""


StartRanks = Callable[[Meeting], RankProcesses]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines, as each of them was given them."""

    number: int
    """Of machines."""
    node: int
    """This one, from 0."""
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
    """Check what was given on the command line; host and port of node 0.

    Raises:
        SettingsError: It cannot be, or others could join.
    """
    host, _, port = rendezvous.rpartition(":")
    if not 0 <= node < number:
        raise SettingsError(
            f"--node-rank must be from 0 to --nodes - 1 = {number - 1}, got {node}; node 0 is the "
            f"one that listens at --rendezvous"
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
