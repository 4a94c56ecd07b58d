"""Ranks on several machines: node 0 starts all of them, and all again when one is lost.

    every other node                  node 0
    join: its number, its ranks  -->  waits for all of them, or enough (`learner.min_ranks`)
    starts its ranks             <--  start: first rank, number of all, port of their store
    ended: exit code             -->  a failure, or a node that is silent, ends all ranks
    ends its ranks, joins again  <--  halt
    ends                         <--  finished: exit code

Rank 0, which talks to Redis and publishes weights, is always on node 0. So node 0 cannot be done
without: the others wait until it is there again. torchrun would put rank 0 on any node, and listen
on every interface; here each socket is on the network of `--rendezvous`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from configs.errors import DeadlineError, SettingsError
from learner.model.rendezvous import RENDEZVOUS_ADDRESS, RENDEZVOUS_SOCKET, interfaces

from .node_zero import NodeZero
from .nodes import Meeting, Nodes, StartRanks
from .other_node import follow
from .rank_processes import RankProcesses, rank_command

NAMED_S = 30.0
"""In which the name of a machine that has just started leads to it: caches of name servers."""
PORT_IS_NOT_OURS = (errno.EADDRINUSE, errno.EACCES)
SIOCGIFADDR = 0x8915  # address of an interface; Linux


def launch_node(nodes: Nodes, start: StartRanks, stopping: threading.Event) -> int:
    """Run the ranks of this machine beside those of the others; the learner's exit code.

    Raises:
        SettingsError: The port cannot be listened on.
        DeadlineError: The nodes do not find one another.
    """
    if nodes.node:
        return follow(nodes, start, stopping)
    listener = _listen(nodes, stopping)
    if listener is None:
        return 0
    with listener:
        return NodeZero(nodes, start, stopping, listener).run()


def _listen(nodes: Nodes, stopping: threading.Event) -> socket.socket | None:
    """Listen where the others look for node 0; None if asked to stop meanwhile."""
    deadline = time.monotonic() + NAMED_S
    while not stopping.is_set():
        try:
            return socket.create_server((nodes.host, nodes.port))
        except OSError as error:
            given = f"{nodes.host}:{nodes.port}: {error.strerror}"
            if error.errno in PORT_IS_NOT_OURS:
                raise SettingsError(
                    f"--rendezvous must be a free address of node 0, which this is, got {given}; "
                    f"choose another port"
                ) from error
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"--rendezvous must lead to node 0, which this is, within {NAMED_S:.0f} s, got "
                    f"{given}; choose an address of this machine, or start it again when its name "
                    f"is known"
                ) from error
        stopping.wait(NAMED_S / 30)
    return None


def starter(arguments: Sequence[str]) -> StartRanks:
    """Return what starts `python -m learner <arguments>` for each rank of this machine."""

    def start(meeting: Meeting) -> RankProcesses:
        environment = {
            RENDEZVOUS_ADDRESS: f"{meeting.host}:{meeting.port}",
            **interfaces(interface_of(meeting.own_address), os.environ),
        }
        inherited = None
        if meeting.listener is not None:
            inherited = meeting.listener.fileno()
            environment[RENDEZVOUS_SOCKET] = str(inherited)
        return RankProcesses(
            rank_command(arguments), meeting.share, environment, inherited=inherited
        )

    return start


def interface_of(address: str) -> str:
    """Find the network interface that has an address, as gloo and NCCL want to be told.

    Raises:
        SettingsError: None has.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(query, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    raise SettingsError(
        f"--rendezvous must be an IPv4 address of one of this machine's interfaces, got {address}; "
        f"choose one that `ip -4 address` lists"
    )
