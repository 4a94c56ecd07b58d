"""Runs on a Redis Cluster: the slot of one moves in its middle, the node of another is killed."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest

from console.run.redis_server import free_port
from tests.buffer.support.cluster import cluster
from tests.system.support.ring_by_hand import RingByHand, assert_one_history

PAUSE_S = 15.0
"""On a busy machine; measured: `docs/operations.md`."""
FAILOVER_S = 30.0
"""After `cluster-node-timeout` of 2 s a node is failed, and its replica elected."""
STEPS = 40
REPLICATED = "repl-diskless-sync-delay 0\n"
DURABLE = "appendonly yes\nmaxmemory 256mb\nmaxmemory-policy noeviction\n"
pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_a_slot_moves_and_only_its_run_pauses(tmp_path: Path) -> None:
    with cluster(tmp_path / "nodes", 2, DURABLE) as nodes:
        nodes.place({"moved": 0, "other": 1})
        moved, other = (ring_of(tmp_path / name, nodes.url) for name in ("moved", "other"))
        try:
            learners = [start(ring) for ring in (moved, other)]
            for ring in (moved, other):
                ring.until(lambda: ring.version() >= 5, "the run trains")  # noqa: B023 - at once

            nodes.move_at_once("moved", 0, 1)
            for ring in (moved, other):
                reached = ring.version()
                ring.until(lambda: ring.version() >= reached + 5, "it goes on", PAUSE_S)  # noqa: B023
            for ring, learner in zip((moved, other), learners, strict=True):
                assert learner.wait(240) == 0, ring.logs()
                print(f"longest time between two batches: {longest_pause_s(ring):.2f} s")
                assert_one_history(ring, STEPS, "first")

            assert recoveries(moved) == 1
            assert recoveries(other) == 0
            assert not any("the store is away" in line["event"] for line in other.log("learner"))
        finally:
            moved.close()
            other.close()


def test_a_run_goes_on_at_the_replica_of_a_killed_node(tmp_path: Path) -> None:
    replica = 3  # primaries vote for it: of two nodes the one that is left would have no majority
    with cluster(tmp_path / "nodes", 4, DURABLE + REPLICATED) as nodes:
        nodes.place({"hit": 1}, num_primaries=3)
        nodes.replicate(1, replica)
        ring = ring_of(tmp_path / "hit", nodes.url)
        try:
            learner = start(ring)
            ring.start("actor-1", "actors")
            ring.until(lambda: ring.version() >= 7, "the run trains")

            nodes.processes[1].send_signal(signal.SIGKILL)
            killed_at = len(ring.rows("first", "metrics"))
            paused_s = ring.until(
                lambda: len(ring.rows("first", "metrics")) >= killed_at + 2,
                "batches at the new primary",
                FAILOVER_S,
            )
            print(f"the second batch after the node was killed came {paused_s:.1f} s later")
            assert learner.wait(240) == 0, ring.logs()

            assert nodes.has("hit", replica)
            assert recoveries(ring) == 1
            assert_one_history(ring, STEPS, "first")
        finally:
            ring.close()


def ring_of(folder: Path, url: str) -> RingByHand:
    folder.mkdir()
    return RingByHand(
        folder,
        url,
        f"run.name={folder.name}",
        f"broker.endpoint=tcp://127.0.0.1:{free_port()}",
        f"run.steps={STEPS}",
        "run.eval_every=0",
        "run.eval_episodes=0",
        "learner.checkpoint_every=5",
    )


def start(ring: RingByHand):
    ring.start("broker", "broker")
    learner = ring.start("learner", "learner")
    ring.start("actor-0", "actors")
    return learner


def recoveries(ring: RingByHand) -> int:
    return sum("LOST WRITES" in line["event"] for line in ring.log("learner"))


def longest_pause_s(ring: RingByHand) -> float:
    """After the first batches, which wait for the actor to start."""
    times: list[float] = [row["time"] for row in ring.rows("first", "metrics")][2:]
    return max(after - before for before, after in pairwise(times))
