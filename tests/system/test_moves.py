"""Broker and learner get new addresses in the middle of a run: actors follow, nothing is lost."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer import operations
from buffer.store import Store
from console.run.redis_server import free_port
from tests.system.support.ring_by_hand import RingByHand, assert_one_history

FOLLOW_S = 15.0
"""On a busy machine; measured: `docs/fleet.md`."""
STEPS = 100
pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture
def ring(redis_url: str, tmp_path: Path) -> Iterator[RingByHand]:
    """With a bucket, which is a folder; evaluation would only take time."""
    running = RingByHand(
        tmp_path,
        redis_url,
        f"broker.endpoint=tcp://127.0.0.1:{free_port()}",
        f"run.steps={STEPS}",
        "run.eval_every=0",
        "run.eval_episodes=0",
        f"learner.checkpoint_url=file://{tmp_path}/bucket",
        "learner.checkpoint_every=20",
        "learner.eval_timeout_s=5",
    )
    try:
        yield running
    finally:
        running.close()


def test_broker_then_learner_move_and_actors_follow(ring: RingByHand) -> None:
    broker = ring.start("broker-1", "broker")
    learner = ring.start("learner-1", "learner")
    for number in range(2):
        ring.start(f"actor-{number}", "actors")
    # A new broker's address comes with weights: an actor without any keeps to its settings.
    ring.until(lambda: all(serves(ring, f"actor-{each}") for each in range(2)), "actors serve")
    ring.until(lambda: ring.version() >= 3, "the run trains")

    broker.send_signal(signal.SIGKILL)
    ring.start("broker-2", "broker", f"broker.endpoint=tcp://127.0.0.2:{free_port()}")
    ring.until(
        lambda: any(line.get("stage") == "listening" for line in ring.log("broker-2")),
        "the broker is there again",
    )
    followed_s = ring.until(
        lambda: joined(ring, "broker-2") >= 2, "actors find the broker", FOLLOW_S
    )
    print(f"the broker moved: actors followed {followed_s:.1f} s after it listened")
    moved_at = ring.version()
    ring.until(lambda: ring.version() >= moved_at + 3, "the run trains again")

    learner.send_signal(signal.SIGTERM)
    assert learner.wait(60) == 0, ring.logs()
    first = [row["step"] for row in ring.rows("first", "batches")]
    assert not (ring.folder / "first" / "tiny" / "summary.json").exists()
    new_home = ring.folder / "second" / "tiny"
    new_home.mkdir(parents=True)
    shutil.copy(ring.folder / "first" / "tiny" / "checkpoint.key", new_home)
    ring.start(
        "learner-2",
        "learner",
        f"run.directory={new_home.parent}",
        "learner.publisher_endpoint=tcp://127.0.0.2:0",
    )
    ring.until(lambda: lineage(ring) == 2, "another life publishes")
    followed_s = ring.until(
        lambda: {actor.fields.get("version", "")[:2] for actor in ring.actors()} == {"2."},
        "actors find the publisher",
        FOLLOW_S,
    )
    print(f"the learner moved: actors had its weights {followed_s:.1f} s after it published")
    assert ring._processes["learner-2"].wait(240) == 0, ring.logs()
    assert len(first) < STEPS
    assert_one_history(ring, STEPS, "first", "second")


def serves(ring: RingByHand, actor: str) -> bool:
    return any(line["event"] == "serving" for line in ring.log(actor))


def joined(ring: RingByHand, broker: str) -> int:
    return sum(line["event"] == "actor joined" for line in ring.log(broker))


def lineage(ring: RingByHand) -> int:
    with Store(ring.url, ring.settings.run.name) as store:
        publication = store.run(operations.publication())
    return publication.version.lineage if publication is not None else 0
