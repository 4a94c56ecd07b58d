"""Launchers of several machines, here in one process: ranks are small programs of their own."""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from configs.errors import DeadlineError, SettingsError, exit_code
from configs.settings import RunSettings
from learner import several_machines
from learner.launch import Nodes, RankProcesses, Rendezvous, check_nodes
from learner.several_machines import ConnectionLost, NodeConnection, interface_of, launch_node
from tests.waiting import wait_until

PATIENCE_S = 30

RANK = """
import os, pathlib, signal, sys, time
folder, life, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(folder / f"{life}-{rank}-of-{os.environ['WORLD_SIZE']}").touch()
code = folder / f"code-{life}-{rank}"
while not code.exists():
    if (folder / "done").exists():
        sys.exit(0)
    time.sleep(0.02)
sys.exit(int(code.read_text()))
"""
"""Ends well at `done`, or with the code that is written down for its life."""


@dataclass
class Machine:
    """A launcher in a thread."""

    folder: Path
    nodes: Nodes
    stopping: threading.Event = field(default_factory=threading.Event)
    lives: int = 0
    processes: RankProcesses | None = None
    code: Future[int] = field(default_factory=Future)

    def start(self, meeting: Rendezvous) -> RankProcesses:
        """Start its ranks, as the start of that number."""
        self.lives += 1
        command = [sys.executable, "-S", "-c", RANK, str(self.folder), str(self.lives)]
        self.processes = RankProcesses(command, meeting.share, {})
        return self.processes

    def run(self) -> int:
        """Be the launcher of this machine."""
        return launch_node(self.nodes, self.start, self.stopping)


@dataclass
class Cluster:
    """Machines, and the files by which ranks and tests speak."""

    folder: Path
    port: int
    machines: list[Machine]
    begin: Callable[..., None] = lambda _: None
    joined: list[NodeConnection] = field(default_factory=list)

    def connect(self) -> socket.socket:
        """Connect to node 0 as soon as it listens."""
        return wait_until(
            lambda: socket.create_connection(("127.0.0.1", self.port)),
            timeout_s=PATIENCE_S,
            ignoring=ConnectionRefusedError,
        )

    def by_hand(self, node: int) -> NodeConnection:
        """Join as a further machine of one rank, without a launcher."""
        joined = NodeConnection(self.connect())
        self.joined.append(joined)
        joined.send(join=node, ranks=1)
        return joined

    def started(self, life: int) -> set[str]:
        """Ranks that were started, as `rank-of-size`."""
        found = self.folder.glob(f"{life}-*")
        return {path.name.partition("-")[2] for path in found}

    def wait_for(self, life: int, *ranks: str) -> None:
        """Wait until exactly these have started."""
        wait_until(
            lambda: self.started(life) == {*ranks},
            lambda: f"started: {self.started(life)}",
            timeout_s=PATIENCE_S,
        )

    def end(self, life: int, rank: int, code: int) -> None:
        """Let a rank end."""
        (self.folder / f"writing-{rank}").write_text(str(code))
        (self.folder / f"writing-{rank}").rename(self.folder / f"code-{life}-{rank}")

    def finish(self) -> list[int]:
        """Let all ranks end well; the exit codes of all launchers."""
        (self.folder / "done").touch()
        return [machine.code.result(PATIENCE_S) for machine in self.machines]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Launchers of two machines of two ranks and one; a third one is `by_hand` where there is."""
    monkeypatch.setattr(several_machines, "SEVERAL_CAUSES_S", 0.2)
    monkeypatch.setattr(several_machines, "PAUSE_S", (0.0, 0.1))
    monkeypatch.setattr(RankProcesses.end_processes, "__defaults__", (0.1,))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    counts = (lambda: 2, lambda: 1)
    cluster = Cluster(tmp_path, port, [])
    with ThreadPoolExecutor(2) as pool:

        def begin(number: int, min_ranks: int = 3, rejoin_s: float = 0.5) -> None:
            for node, count in enumerate(counts):
                nodes = Nodes(number, node, "127.0.0.1", port, count, min_ranks, rejoin_s=rejoin_s)
                machine = Machine(tmp_path, nodes)
                machine.code = pool.submit(machine.run)
                cluster.machines.append(machine)

        cluster.begin = begin
        yield cluster
        (tmp_path / "done").touch()
        for machine in cluster.machines:
            machine.stopping.set()
        for joined in cluster.joined:
            joined.close()


ALL = ("0-of-3", "1-of-3", "2-of-3")


def test_every_rank_of_every_machine_is_started_and_ends(machines: Cluster) -> None:
    machines.begin(2)
    with machines.connect() as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        machines.wait_for(1, *ALL)

    assert machines.finish() == [0, 0]


def test_after_a_failure_all_are_started_again(machines: Cluster) -> None:
    machines.begin(2)
    machines.wait_for(1, *ALL)

    machines.end(1, 2, 1)

    machines.wait_for(2, *ALL)
    assert machines.finish() == [0, 0]
    assert [machine.lives for machine in machines.machines] == [2, 2]


def test_what_only_a_person_can_mend_ends_all_with_its_code(machines: Cluster) -> None:
    machines.begin(2)
    machines.wait_for(1, *ALL)

    machines.end(1, 0, 1)  # as what waits for the other fails
    machines.end(1, 2, 2)

    assert [machine.code.result(PATIENCE_S) for machine in machines.machines] == [2, 2]
    assert [machine.lives for machine in machines.machines] == [1, 1]


@pytest.mark.slow
def test_a_lost_machine_is_done_without_until_the_next_start(machines: Cluster) -> None:
    machines.begin(3, rejoin_s=4.0)  # a busy machine is slow to join
    third = machines.by_hand(2)
    assert _message(third) == {"start": [3, 1, 4], "port": ANY}
    machines.wait_for(1, "0-of-4", "1-of-4", "2-of-4")

    third.close()
    machines.wait_for(2, *ALL)
    third = machines.by_hand(2)
    machines.end(2, 0, 1)
    assert _message(third) == {"halt": True}
    third.send(join=2, ranks=1)

    machines.wait_for(3, "0-of-4", "1-of-4", "2-of-4")
    third.close()


@pytest.mark.slow
def test_without_enough_ranks_a_lost_machine_is_waited_for(machines: Cluster) -> None:
    machines.begin(3, min_ranks=4)
    third = machines.by_hand(2)
    machines.wait_for(1, "0-of-4", "1-of-4", "2-of-4")
    third.close()

    time.sleep(1.5)  # thrice the wait for nodes that can be done without
    assert not machines.started(2)

    third = machines.by_hand(2)
    machines.wait_for(2, "0-of-4", "1-of-4", "2-of-4")
    third.close()


def start_nothing(_meeting: Rendezvous) -> RankProcesses:
    raise AssertionError("no rank may be started")


@pytest.mark.slow
def test_machines_that_do_not_come_end_the_others_with_a_code_that_asks_for_another_start(
    machines: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_machines, "JOIN_S", 4.0)  # the other may try twice

    machines.begin(3, min_ranks=4)

    zero, other = machines.machines
    with pytest.raises(DeadlineError, match=r"must join within 4 s, got 2 with") as ended:
        zero.code.result(PATIENCE_S)
    assert other.code.result(PATIENCE_S) == exit_code(ended.value) == 1


def test_a_machine_that_finds_no_node_0_asks_for_another_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_machines, "CONNECT_FOR_S", 0.0)
    nodes = Nodes(2, 1, "127.0.0.1", 1, lambda: 1)

    with pytest.raises(
        DeadlineError, match=r"where node 0 listens, got 127\.0\.0\.1:1, which"
    ) as ended:
        launch_node(nodes, start_nothing, threading.Event())
    assert exit_code(ended.value) == 1


def test_node_0_waits_for_its_name(machines: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    known = iter([OSError(-2, "Name or service not known"), OSError(errno.EADDRNOTAVAIL, "old")])
    create = socket.create_server

    def named_late(address: tuple[str, int]) -> socket.socket:
        if (error := next(known, None)) is not None:
            raise error
        return create(address)

    monkeypatch.setattr(several_machines, "NAMED_S", 3.0)  # ten looks a second
    monkeypatch.setattr(socket, "create_server", named_late)
    machines.begin(2)

    machines.wait_for(1, *ALL)
    assert machines.finish() == [0, 0]


@pytest.mark.parametrize("host", ["192.0.2.1", "node-0.invalid"])
def test_a_node_0_to_which_its_name_does_not_lead_asks_for_another_start(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(several_machines, "NAMED_S", 0.0)
    nodes = Nodes(2, 0, host, 29400, lambda: 1)

    with pytest.raises(
        DeadlineError, match=f"must lead to this machine, .* got {host}:29400"
    ) as ended:
        launch_node(nodes, start_nothing, threading.Event())
    assert exit_code(ended.value) == 1


def test_a_port_in_use_needs_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        nodes = Nodes(2, 0, "127.0.0.1", other.getsockname()[1], lambda: 1)

        with pytest.raises(SettingsError, match=r"must be a free address .* choose another"):
            launch_node(nodes, start_nothing, threading.Event())


def test_a_stop_at_any_machine_reaches_rank_0(machines: Cluster) -> None:
    machines.begin(2)
    machines.wait_for(1, *ALL)

    machines.machines[1].stopping.set()

    assert [machine.code.result(PATIENCE_S) for machine in machines.machines] == [0, 0]
    assert [machine.lives for machine in machines.machines] == [1, 1]


def test_a_silent_machine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_machines, "SILENT_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = NodeConnection(ours)
        time.sleep(0.1)

        with pytest.raises(ConnectionLost, match="silent"):
            connection.receive()


@pytest.mark.parametrize("sent", [b"{]\n", b"[1]\n", b"x" * 10_000])
def test_what_no_launcher_sends_ends_the_connection(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = NodeConnection(ours)
        theirs.sendall(sent)

        with pytest.raises(ConnectionLost, match="not a launcher"):
            _message(connection)


@pytest.mark.parametrize(
    ("node", "rendezvous", "sentence"),
    [
        (2, "127.0.0.1:1", r"--node-rank must be from 0 to --nodes - 1 = 1, got 2"),
        (0, "127.0.0.1", r"--rendezvous must be the host:port at which node 0 listens"),
        (1, "10.0.0.1:29400", r"must be on loopback where run.trusted_network is false"),
    ],
)
def test_what_was_given_wrongly_is_refused(node: int, rendezvous: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        check_nodes(RunSettings(model="init"), 2, node, rendezvous)


def test_a_trusted_network_and_loopback_are_taken() -> None:
    trusting = RunSettings(model="init", trusted_network=True)

    assert check_nodes(trusting, 2, 1, "10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert check_nodes(RunSettings(model="init"), 2, 0, "127.0.0.1:1") == ("127.0.0.1", 1)
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(SettingsError, match=r"one of this machine's interfaces, got 192\.0\.2\.1"):
        interface_of("192.0.2.1")


def _message(connection: NodeConnection) -> dict[str, Any]:
    return wait_until(connection.receive, timeout_s=PATIENCE_S)[0]
