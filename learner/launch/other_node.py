"""Any node but 0: starts and ends its ranks as node 0 says, and waits for one that is gone."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import structlog

from configs.errors import DeadlineError

from .lines import Lines, Lost
from .nodes import JOIN_S, Meeting, Nodes, StartRanks
from .rank_processes import TICK_S, RankProcesses, Share

log = structlog.get_logger()

CONNECT_S = 2.0
AGAIN_S = (0.5, 1.5)


def follow(nodes: Nodes, start: StartRanks, stopping: threading.Event) -> int:
    """Take part until node 0 says that the learner has ended; its exit code.

    Raises:
        DeadlineError: Node 0 does not listen.
    """
    while (lines := _connect(nodes, stopping)) is not None:
        follower = _Follower(nodes, start, stopping, lines)
        try:
            return follower.run()
        except Lost as error:
            log.error("node 0 is gone; waiting for it", reason=str(error))
        finally:
            follower.end_ranks()
            lines.close()
    return 0


def _connect(nodes: Nodes, stopping: threading.Event) -> Lines | None:
    """Reach node 0; None if asked to stop meanwhile."""
    deadline = time.monotonic() + JOIN_S
    while not stopping.is_set():
        with contextlib.suppress(OSError):
            return Lines(socket.create_connection((nodes.host, nodes.port), timeout=CONNECT_S))
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"--rendezvous must be where node 0 listens, got {nodes.host}:{nodes.port}, which "
                f"did not answer for {JOIN_S:.0f} s; start node 0"
            )
        stopping.wait(random.uniform(*AGAIN_S))
    return None


@dataclass(slots=True, eq=False)
class _Follower:
    """This machine, while node 0 is there."""

    nodes: Nodes
    start: StartRanks
    stopping: threading.Event
    lines: Lines
    processes: RankProcesses | None = None
    is_reported: bool = False
    """Node 0 has the exit code of these processes."""
    is_told: bool = False
    """Node 0 was asked to stop."""

    def run(self) -> int:
        """Start and end ranks as node 0 says; the exit code in the end."""
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
        """End them, if they run."""
        if self.processes is not None:
            self.processes.end()
            self.processes = None

    def _join(self) -> None:
        self.lines.send(join=self.nodes.node, ranks=self.nodes.ranks())

    def _obey(self, message: dict[str, Any]) -> None:
        if "halt" in message:
            self.end_ranks()
            self._join()
        if "start" in message:
            share, port = Share(*message["start"]), int(message["port"])
            meeting = Meeting(share, self.nodes.host, port, self.lines.own_address)
            self.processes, self.is_reported = self.start(meeting), False

    def _report(self) -> None:
        code = None if self.processes is None else self.processes.code()
        if code is not None and not self.is_reported:
            self.lines.send(ended=code)
            self.is_reported = True
        if self.stopping.is_set() and not self.is_told:
            self.lines.send(stop=True)
            self.is_told = True
