"""Node 0: counts the launchers that are there, starts all ranks, and starts all again.

A rank that fails, or a node that is gone, ends all ranks. Codes that only a person can do something
about end the learner; after all others the ranks begin at the newest checkpoint, with all nodes, or
with those that are there if they are enough.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import structlog

from configs.errors import DeadlineError, NyalaError, exit_code

from .lines import Lines, Lost
from .nodes import JOIN_S, Meeting, Nodes, StartRanks
from .rank_processes import TICK_S, RankProcesses, Share

log = structlog.get_logger()

SEVERAL_CAUSES_S = 2.0
"""From a rank's failure to the end of those that it takes with it: the first is not the cause."""
PAUSE_S = (1.0, 3.0)
MOST_FAILURES = 10
"""In a row, each within `JOIN_S` of its start: then another start does not help."""
HELPLESS = (2, 3)
"""Exit codes after which no other start helps: a person must act; another learner has the run."""


@dataclass(slots=True, eq=False)
class Member:
    """Another node, as node 0 sees it."""

    lines: Lines
    node: int = -1
    """-1 until it has joined."""
    ranks: int = 0
    is_ready: bool = False
    """It waits for its ranks to be started."""
    code: int | None = None
    """Of its ranks."""


@dataclass(slots=True, eq=False)
class NodeZero:
    """The launcher that the others follow."""

    nodes: Nodes
    start: StartRanks
    stopping: threading.Event
    listener: socket.socket
    members: list[Member] = field(default_factory=list)

    def run(self) -> int:
        """Start all ranks, again and again, until they end for good; the exit code."""
        self.listener.setblocking(False)
        failures = code = 0
        try:
            own = self.nodes.ranks()
            while (ready := self._gather(own)) is not None:
                began = time.monotonic()
                code = self._run_once(own, ready)
                failures = failures + 1 if time.monotonic() - began < JOIN_S else 1
                if code == 0 or code in HELPLESS or failures > MOST_FAILURES:
                    break
                log.error("ranks failed; all begin at the newest checkpoint", exit_code=code)
                self.stopping.wait(random.uniform(*PAUSE_S))
                own = self.nodes.ranks()
        except NyalaError as error:
            code = exit_code(error)
            raise
        except BaseException:
            code = 1
            raise
        finally:
            self._tell_all(finished=code)
            for member in self.members:
                member.lines.end()
        return code

    def _gather(self, own: int) -> list[Member] | None:
        """Wait for the other nodes, in their order; None if asked to stop meanwhile.

        Raises:
            DeadlineError: Too few came.
        """
        began = time.monotonic()
        least = self.nodes.min_ranks
        while not self.stopping.is_set():
            self._listen()
            ready = sorted((m for m in self.members if m.is_ready), key=lambda m: m.node)
            size = own + sum(member.ranks for member in ready)
            waited_s = time.monotonic() - began
            if len(ready) == self.nodes.number - 1:
                return ready
            is_enough = least is not None and size >= least and self.nodes.fits(size)
            if is_enough and waited_s > self.nodes.rejoin_s:
                log.warning("going on without the nodes that are gone", ranks=size)
                return ready
            if waited_s > JOIN_S:
                there = ", ".join(str(member.node) for member in ready) or "none"
                raise DeadlineError(
                    f"--nodes must all be there within {JOIN_S:.0f} s, got {there} of 1 to "
                    f"{self.nodes.number - 1}; start the others with the same --rendezvous, or "
                    f"set learner.min_ranks to go on with fewer"
                )
            time.sleep(TICK_S)
        return None

    def _run_once(self, own: int, ready: list[Member]) -> int:
        """Start all ranks, and wait until they have ended; their exit code."""
        size = own + sum(member.ranks for member in ready)
        host = self.nodes.host
        with socket.create_server((host, 0)) as store:
            port = store.getsockname()[1]
            share = Share(0, own, size)
            processes = self.start(Meeting(share, host, port, socket.gethostbyname(host), store))
        first = own
        for member in ready:
            member.code = None
            with contextlib.suppress(Lost):  # noticed when it is read from
                member.lines.send(start=(first, member.ranks, size), port=port)
            first += member.ranks
        try:
            return self._watch(processes, ready)
        finally:
            self._tell_all(halt=True)
            processes.end()
            for member in self.members:
                member.is_ready = False

    def _watch(self, processes: RankProcesses, ready: list[Member]) -> int:
        is_told = False
        failed_at: float | None = None
        while True:
            if self.stopping.is_set() and not is_told:
                processes.signal(signal.SIGTERM)  # rank 0 checkpoints, and all end
                is_told = True
            self._listen()
            own = processes.code()
            codes = [own, *(1 if m not in self.members else m.code for m in ready)]
            failed = [code for code in codes if code]
            if own == 0 and not failed:
                return 0
            if helpless := [code for code in failed if code in HELPLESS]:
                return helpless[0]
            if failed:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > SEVERAL_CAUSES_S:
                    return failed[0]
            time.sleep(TICK_S)

    def _listen(self) -> None:
        """Read what nodes say, let new ones in, and forget those that are gone."""
        with contextlib.suppress(BlockingIOError):
            while len(self.members) < 2 * self.nodes.number:
                self.members.append(Member(Lines(self.listener.accept()[0])))
        for member in [*self.members]:
            try:
                for message in member.lines.receive():
                    self._take(member, message)
            except (Lost, ValueError, TypeError, KeyError) as error:
                member.lines.close()
                if member in self.members:
                    log.warning("node lost", node=member.node, reason=str(error))
                    self.members.remove(member)

    def _take(self, member: Member, message: dict[str, Any]) -> None:
        if "join" in message:
            member.node, member.ranks = int(message["join"]), int(message["ranks"])
            if not 0 < member.node < self.nodes.number or member.ranks < 1:
                raise ValueError("it is no node of this learner")
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
            with contextlib.suppress(Lost):
                member.lines.send(**message)
