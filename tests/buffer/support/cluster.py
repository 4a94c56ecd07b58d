"""A Redis Cluster of some primaries, between which the slots of runs are moved."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from buffer.operations.keys import run_prefix
from console.run.redis_server import free_port
from tests.waiting import wait_until

from .servers import PASSWORD, server

BUS_ABOVE = 10_000  # nodes talk to each other at a port so much higher
SETTINGS = "cluster-enabled yes\ncluster-node-timeout 2000\n"
SLOTS = 16384


class Cluster:
    """Its nodes, by number."""

    def __init__(self, servers: list[tuple[subprocess.Popen[bytes], int]]) -> None:
        self.processes = [process for process, _ in servers]
        self.ports = ports = [port for _, port in servers]
        self.nodes: list[redis.Redis] = [
            redis.Redis(port=port, password=PASSWORD, decode_responses=True) for port in ports
        ]
        for node in self.nodes:
            wait_until(lambda: bool(node.ping()), ignoring=redis.RedisError)  # noqa: B023 - at once
        for port in ports[1:]:
            self.ask(0, "MEET", "127.0.0.1", port)
        self.ids = [self.ask(number, "MYID") for number in range(len(ports))]

    @property
    def url(self) -> str:
        """Of all of them, the first of which is away."""
        nodes = ",".join(f"127.0.0.1:{port}" for port in (free_port(), *self.ports))
        return f"redis+cluster://:{PASSWORD}@{nodes}"

    def ask(self, node: int, *command: str | int) -> Any:
        """Run a subcommand of CLUSTER on a node."""
        return self.nodes[node].execute_command("CLUSTER", *command)

    def slot_of(self, run: str) -> int:
        """The slot of a run's keys."""
        return int(self.ask(0, "KEYSLOT", run_prefix(run)))

    def place(self, runs: dict[str, int], *, num_primaries: int | None = None) -> None:
        """Divide all slots, these runs' as named and the others evenly; once.

        A node that loses its last slot would become a replica.

        Args:
            runs: By name, and the node of each.
            num_primaries: Nodes that get slots, the first of all; None = every one.
        """
        chosen = {self.slot_of(run): node for run, node in runs.items()}
        num_primaries = num_primaries or len(self.nodes)
        for node in range(num_primaries):
            own = [s for s in range(SLOTS) if chosen.get(s, s * num_primaries // SLOTS) == node]
            self.ask(node, "ADDSLOTS", *own)
        for node in range(len(self.nodes)):
            self._wait_for_info(node, "cluster_state:ok")
            self._wait_for_info(node, f"cluster_known_nodes:{len(self.nodes)}")

    def _wait_for_info(self, node: int, words: str) -> None:
        wait_until(lambda: words in self.ask(node, "INFO"), ignoring=redis.RedisError)

    def replicate(self, primary: int, replica: int) -> None:
        """Let a node without slots follow another; returns once it has all of its keys."""
        self.ask(replica, "REPLICATE", self.ids[primary])
        node = self.nodes[replica]
        wait_until(
            lambda: node.info("replication").get("master_link_status") == "up",
            ignoring=redis.RedisError,
        )

    def move_at_once(self, run: str, source: int, target: int) -> None:
        """Move a run atomically, as Valkey 9 does; returns once it is over."""
        slot = self.slot_of(run)
        self.ask(source, "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.ids[target])
        wait_until(lambda: self.has(run, target), ignoring=redis.RedisError)

    def begin_move(self, run: str, source: int, target: int) -> None:
        """Begin to move a run key by key; no key has moved yet."""
        slot = self.slot_of(run)
        self.ask(target, "SETSLOT", slot, "IMPORTING", self.ids[source])
        self.ask(source, "SETSLOT", slot, "MIGRATING", self.ids[target])

    def move_keys(self, run: str, source: int, target: int, count: int) -> int:
        """Move so many keys; returns how many there were to move."""
        keys = self.ask(source, "GETKEYSINSLOT", self.slot_of(run), count)
        if keys:
            there = ("127.0.0.1", self.ports[target], "", 0, 5000, "AUTH", PASSWORD, "KEYS")
            self.nodes[source].execute_command("MIGRATE", *there, *keys)
        return len(keys)

    def end_move(self, run: str, source: int, target: int) -> None:
        """Give the slot to the target, all of whose keys it must have."""
        slot = self.slot_of(run)
        for node in (target, source):
            self.ask(node, "SETSLOT", slot, "NODE", self.ids[target])
        wait_until(lambda: self.has(run, target), ignoring=redis.RedisError)

    def has(self, run: str, node: int) -> bool:
        """Whether a node serves the run, by its own account."""
        slot, own = self.slot_of(run), self.ask(node, "SLOTS")
        return any(
            first <= slot <= last and str(primary[2]) == self.ids[node]
            for first, last, primary, *_ in own
        )

    def close(self) -> None:
        """Close connections."""
        for node in self.nodes:
            node.close()


@contextmanager
def cluster(folder: Path, num_nodes: int, more: str = "") -> Iterator[Cluster]:
    """Run nodes that have met, and no slots; `more` are settings of each."""
    password = f"requirepass {PASSWORD}\nmasterauth {PASSWORD}\n"
    with ExitStack() as stack:
        settings = f'save ""\n{SETTINGS}{password}{more}'
        servers = [
            stack.enter_context(server(folder / f"node-{number}", settings, port=low_port()))
            for number in range(num_nodes)
        ]
        running = Cluster(servers)
        stack.callback(running.close)
        yield running


def low_port() -> int:
    """A free port below those whose bus would have none."""
    while (port := free_port()) + BUS_ABOVE >= 2**16:
        continue
    return port
