"""Ranks on several machines: node 0 starts all of them, and all again when one is lost.

`python -m learner --nodes N` runs it on each machine: `NodeZero` on node 0, `follow` on the others.

    every other node                  node 0
    join: its number, its ranks  -->  waits for all of them, or enough (`learner.min_ranks`)
    starts its ranks             <--  start: first rank, number of all, port of their store
    ended: exit code             -->  a failure, or a node that is silent, ends all ranks
    stop: it was asked to stop   -->  stops as if it had been asked itself
    ends its ranks, joins again  <--  halt
    ends                         <--  finished: exit code

Rank 0, which talks to Redis and publishes weights, is always on node 0. So the learner needs node
0, and the other nodes wait until it is there again. torchrun would put rank 0 on any node, and
listen on every interface; here each socket is on the network of `--rendezvous`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from configs.errors import DeadlineError, NyalaError, SettingsError, exit_code
from learner.model.rendezvous import RENDEZVOUS_ADDRESS, RENDEZVOUS_SOCKET, interfaces

from .launch import (
    JOIN_S,
    TICK_S,
    MachineRanks,
    Nodes,
    RankProcesses,
    Rendezvous,
    StartRanks,
    rank_command,
)

# --------------------------------------------------------------------------------------------------
# A connection between the launchers of two machines: JSON objects, one a line, and signs of life.
#
# It neither authenticates nor encrypts, as the process groups that it prepares.

ALIVE_S = 1.0
SILENT_S = 15.0
"""After which a machine counts as gone: a switch that starts again is not worth a restart."""
SEND_S = 5.0
END_S = 10.0  # the other side may wait for its ranks to end
LONGEST_LINE = 4096


class ConnectionLost(Exception):
    """The other side is gone, silent, or no launcher of Nyala."""


class NodeConnection:
    """One end of a connection; `receive` is called several times a second."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = b""
        self._is_closed = False
        """The other side sends nothing more."""
        self._heard_at = self._sent_at = time.monotonic()

    @property
    def own_address(self) -> str:
        """Address of this machine on the route to the other one."""
        return str(self._socket.getsockname()[0])

    def send(self, **message: Any) -> None:
        """Send a message as one line of JSON.

        Raises:
            ConnectionLost: The other side is gone, or takes nothing for `SEND_S`.
        """
        self._sent_at = time.monotonic()
        try:
            self._socket.settimeout(SEND_S)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> list[dict[str, Any]]:
        """Take the messages that have arrived, without waiting, and give a sign of life.

        Raises:
            ConnectionLost: The other side is gone, has been silent for `SILENT_S`, or sends
                something other than JSON objects.
        """
        if time.monotonic() - self._sent_at > ALIVE_S and not self._is_closed:
            self.send()
        try:
            self._socket.settimeout(0.0)
            while chunk := self._socket.recv(LONGEST_LINE):
                self._received += chunk
                self._heard_at = time.monotonic()
                if len(self._received) > LONGEST_LINE:
                    break
            else:
                self._is_closed = True
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if time.monotonic() - self._heard_at > SILENT_S:
            raise ConnectionLost(f"it has been silent for {SILENT_S:.0f} s")
        messages = self._messages()
        if self._is_closed and not messages:
            raise ConnectionLost("it has closed the connection")
        return messages

    def close_after_peer(self) -> None:
        """End the connection once the other side has, so that it reads what was sent last.

        Waits `END_S` for the other side, and somewhat longer if it still sends.
        """
        deadline = time.monotonic() + END_S
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(END_S)
            while self._socket.recv(LONGEST_LINE) and time.monotonic() < deadline:
                pass
        self.close()

    def close(self) -> None:
        """Close the connection to the other side."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _messages(self) -> list[dict[str, Any]]:
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise ConnectionLost("it is not a launcher of a learner") from error
        if len(self._received) > LONGEST_LINE or not all(isinstance(m, dict) for m in messages):
            raise ConnectionLost("it is not a launcher of a learner")
        return [message for message in messages if message]


# --------------------------------------------------------------------------------------------------
# Node 0: counts the launchers that are there, starts all ranks, and starts all again.
#
# A rank that fails, or a node that is gone, ends all ranks. Codes that only a person can do
# something about end the learner; after all others the ranks begin at the newest checkpoint, with
# all nodes, or with those that are there if they are enough.

log = structlog.get_logger()

SEVERAL_CAUSES_S = 2.0
"""Time from a rank's failure to the end of the ranks that fail with it; the first to end is not
always the cause."""
PAUSE_S = (1.0, 3.0)
MOST_FAILURES = 10
"""Failures in a row, each within `JOIN_S` of the start, after which starting again is given up."""
HELPLESS = (2, 3)
"""Exit codes after which starting again does not help: a person must act, or another learner has
the run."""


@dataclass(slots=True, eq=False)
class RemoteNode:
    """Another node, as node 0 sees it."""

    lines: NodeConnection
    node: int = -1
    """-1 until it has joined."""
    ranks: int = 0
    is_ready: bool = False
    """Whether it waits for its ranks to be started."""
    code: int | None = None
    """Exit code of its ranks."""


@dataclass(slots=True, eq=False)
class NodeZero:
    """The launcher on node 0, which the other nodes follow."""

    nodes: Nodes
    start: StartRanks
    stopping: threading.Event
    listener: socket.socket
    members: list[RemoteNode] = field(default_factory=list)

    def run(self) -> int:
        """Start all ranks, again and again, until they end for good; return the exit code.

        They end for good with code 0, with a code of `HELPLESS`, after more than `MOST_FAILURES`
        failures in a row, or once this is asked to stop. The other nodes are told the code, also
        where this raises.

        Raises:
            DeadlineError: Too few nodes joined within `JOIN_S`.
            SettingsError: This machine has too few GPUs.
        """
        self.listener.setblocking(False)
        failures = code = 0
        try:
            local_ranks = self.nodes.ranks()
            while (ready := self._gather(local_ranks)) is not None:
                began = time.monotonic()
                code = self._run_once(local_ranks, ready)
                failures = failures + 1 if time.monotonic() - began < JOIN_S else 1
                if code == 0 or code in HELPLESS or failures > MOST_FAILURES:
                    break
                log.error("ranks failed; all begin at the newest checkpoint", exit_code=code)
                self.stopping.wait(random.uniform(*PAUSE_S))
                local_ranks = self.nodes.ranks()
        except NyalaError as error:
            code = exit_code(error)
            raise
        except BaseException:
            code = 1
            raise
        finally:
            self._tell_all(finished=code)
            for member in self.members:
                member.lines.close_after_peer()
        return code

    def _gather(self, local_ranks: int) -> list[RemoteNode] | None:
        """Wait for the other nodes, in their order; None if asked to stop meanwhile.

        Raises:
            DeadlineError: Too few came.
        """
        began = time.monotonic()
        least = self.nodes.min_ranks
        while not self.stopping.is_set():
            self._listen()
            ready = sorted((m for m in self.members if m.is_ready), key=lambda m: m.node)
            size = local_ranks + sum(member.ranks for member in ready)
            waited_s = time.monotonic() - began
            if len(ready) == self.nodes.number - 1:
                return ready
            is_enough = least is not None and size >= least and self.nodes.fits(size)
            if is_enough and waited_s > self.nodes.rejoin_s:
                log.warning("continuing without the lost nodes", ranks=size)
                return ready
            if waited_s > JOIN_S:
                there = {member.node for member in ready}
                others = ", ".join(str(n) for n in range(1, self.nodes.number) if n not in there)
                raise DeadlineError(
                    f"all {self.nodes.number} nodes (--nodes) must join within {JOIN_S:.0f} s, got "
                    f"{1 + len(ready)} with {size} rank(s); start what is missing (--node-rank "
                    f"{others}) with the same --rendezvous, or set learner.min_ranks and parallel "
                    "so that these ranks are enough"
                )
            time.sleep(TICK_S)
        return None

    def _run_once(self, local_ranks: int, ready: list[RemoteNode]) -> int:
        """Start all ranks, wait until they have ended, and return their exit code."""
        size = local_ranks + sum(member.ranks for member in ready)
        host = self.nodes.host
        with socket.create_server((host, 0)) as store:
            port = store.getsockname()[1]
            share = MachineRanks(0, local_ranks, size)
            processes = self.start(Rendezvous(share, host, port, socket.gethostbyname(host), store))
        first = local_ranks
        for member in ready:
            member.code = None
            with contextlib.suppress(ConnectionLost):  # noticed when it is read from
                member.lines.send(start=(first, member.ranks, size), port=port)
            first += member.ranks
        try:
            return self._watch(processes, ready)
        finally:
            self._tell_all(halt=True)
            processes.end_processes()
            for member in self.members:
                member.is_ready = False

    def _watch(self, processes: RankProcesses, ready: list[RemoteNode]) -> int:
        is_told = False
        failed_at: float | None = None
        while True:
            if self.stopping.is_set() and not is_told:
                processes.signal(signal.SIGTERM)  # rank 0 checkpoints, and all end
                is_told = True
            self._listen()
            local_exit_code = processes.code()
            codes = [local_exit_code, *(1 if m not in self.members else m.code for m in ready)]
            failed = [code for code in codes if code]
            if local_exit_code == 0 and not failed:
                return 0
            if helpless := [code for code in failed if code in HELPLESS]:
                return helpless[0]
            if failed:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > SEVERAL_CAUSES_S:
                    return failed[0]
            time.sleep(TICK_S)

    def _listen(self) -> None:
        """Read messages of nodes, accept new nodes, and drop those that are gone."""
        with contextlib.suppress(BlockingIOError):
            while len(self.members) < 2 * self.nodes.number:
                self.members.append(RemoteNode(NodeConnection(self.listener.accept()[0])))
        for member in [*self.members]:
            try:
                for message in member.lines.receive():
                    self._take(member, message)
            except (ConnectionLost, ValueError, TypeError, KeyError) as error:
                member.lines.close()
                if member in self.members:
                    log.warning("node lost", node=member.node, reason=str(error))
                    self.members.remove(member)

    def _take(self, member: RemoteNode, message: dict[str, Any]) -> None:
        if "join" in message:
            member.node, member.ranks = int(message["join"]), int(message["ranks"])
            if not 0 < member.node < self.nodes.number or member.ranks < 1:
                raise ValueError("it is not a node of this learner")
            earlier = [m for m in self.members if m.node == member.node and m is not member]
            for other in earlier:  # its launcher was started again
                other.lines.close()
                self.members.remove(other)
            member.is_ready = True
            log.info("node joined", node=member.node, ranks=member.ranks)
        if "ended" in message:
            member.code = int(message["ended"])
        if "stop" in message:
            self.stopping.set()

    def _tell_all(self, **message: Any) -> None:
        for member in self.members:
            with contextlib.suppress(ConnectionLost):
                member.lines.send(**message)


# --------------------------------------------------------------------------------------------------
# Any node but 0: starts and ends its ranks as node 0 says, and waits for one that is gone.

CONNECT_S = 2.0
CONNECT_FOR_S = JOIN_S
"""Time within which node 0 must answer, at least by a try of `CONNECT_S` that comes late."""
AGAIN_S = (0.5, 1.5)


def follow(nodes: Nodes, start: StartRanks, stopping: threading.Event) -> int:
    """Take part until node 0 reports the end of the learner; return its exit code.

    Where node 0 is gone, the ranks here are ended, and it is waited for. 0 if asked to stop then.

    Raises:
        DeadlineError: Node 0 has not listened for `CONNECT_FOR_S`.
        SettingsError: As `usable_ranks` and `interface_of` raise it.
    """
    while (lines := _connect(nodes, stopping)) is not None:
        follower = _FollowerNode(nodes, start, stopping, lines)
        try:
            return follower.run()
        except ConnectionLost as error:
            log.error("node 0 is gone; waiting for it", reason=str(error))
        finally:
            follower.end_ranks()
            lines.close()
    return 0


def _connect(nodes: Nodes, stopping: threading.Event) -> NodeConnection | None:
    """Connect to node 0; None if asked to stop meanwhile."""
    deadline = time.monotonic() + CONNECT_FOR_S
    while not stopping.is_set():
        with contextlib.suppress(OSError):
            return NodeConnection(
                socket.create_connection((nodes.host, nodes.port), timeout=CONNECT_S)
            )
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"--rendezvous must be where node 0 listens, got {nodes.host}:{nodes.port}, which "
                f"did not answer for {CONNECT_FOR_S:.0f} s; start node 0, or correct the address"
            )
        stopping.wait(random.uniform(*AGAIN_S))
    return None


@dataclass(slots=True, eq=False)
class _FollowerNode:
    """This machine, while it is connected to node 0."""

    nodes: Nodes
    start: StartRanks
    stopping: threading.Event
    lines: NodeConnection
    processes: RankProcesses | None = None
    is_reported: bool = False
    """Node 0 has the exit code of these processes."""
    is_told: bool = False
    """Node 0 was asked to stop."""

    def run(self) -> int:
        """Start and end ranks as node 0 says; return the exit code in the end."""
        self._join()
        while True:
            messages = self.lines.receive()
            for message in messages:
                if "finished" in message:
                    return int(message["finished"])
            for message in messages:
                self._obey(message)
            self._report()
            time.sleep(TICK_S)

    def end_ranks(self) -> None:
        """End the ranks of this machine, if they run."""
        if self.processes is not None:
            self.processes.end_processes()
            self.processes = None

    def _join(self) -> None:
        self.lines.send(join=self.nodes.node, ranks=self.nodes.ranks())

    def _obey(self, message: dict[str, Any]) -> None:
        if "halt" in message:
            self.end_ranks()
            self._join()
        if "start" in message:
            share, port = MachineRanks(*message["start"]), int(message["port"])
            meeting = Rendezvous(share, self.nodes.host, port, self.lines.own_address)
            self.processes, self.is_reported = self.start(meeting), False

    def _report(self) -> None:
        code = None if self.processes is None else self.processes.code()
        if code is not None and not self.is_reported:
            self.lines.send(ended=code)
            self.is_reported = True
        if self.stopping.is_set() and not self.is_told:
            self.lines.send(stop=True)
            self.is_told = True


# --------------------------------------------------------------------------------------------------
# The launcher of one machine.

NAMED_S = 30.0
"""Time until the name of a machine that has just started resolves: name servers cache."""
PORT_IS_NOT_OURS = (errno.EADDRINUSE, errno.EACCES)
SIOCGIFADDR = 0x8915  # address of an interface; Linux


def launch_node(nodes: Nodes, start: StartRanks, stopping: threading.Event) -> int:
    """Run the ranks of this machine beside those of the others; return the learner's exit code.

    0 also if asked to stop before the nodes have met.

    Raises:
        SettingsError: The port cannot be listened on, or this machine has too few GPUs or no
            interface in the network of node 0.
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
            address = f"{nodes.host}:{nodes.port}: {error.strerror}"
            if error.errno in PORT_IS_NOT_OURS:
                raise SettingsError(
                    f"--rendezvous must be a free address of this machine, node 0, got {address}; "
                    f"choose another port, above 1023, on all nodes"
                ) from error
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"--rendezvous must lead to this machine, node 0, within {NAMED_S:.0f} s, got "
                    f"{address}; choose an address of this machine, or start it again when its "
                    f"name is known"
                ) from error
        stopping.wait(NAMED_S / 30)
    return None


def starter(arguments: Sequence[str]) -> StartRanks:
    """Return a function that starts `python -m learner <arguments>` for each local rank."""

    def start(meeting: Rendezvous) -> RankProcesses:
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
    """Find the network interface that has an address: gloo and NCCL ask for its name.

    Raises:
        SettingsError: No interface has the address.
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
        f"the way to --rendezvous must begin at an IPv4 address of one of this machine's "
        f"interfaces, got {address}; choose an address of node 0 in a network that "
        f"`ip -4 address` lists here"
    )
