"""Sentinels make a replica the primary in the middle of a run: batches go on, nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from console.run.redis_server import free_port
from tests.buffer.support.servers import watched_pair
from tests.system.support.ring_by_hand import RingByHand, assert_one_history

GO_ON_S = 20.0
"""On a busy machine; measured: `docs/operations.md`."""
STEPS = 60
DURABLE = "appendonly yes\nappendfsync everysec\nmaxmemory 256mb\nmaxmemory-policy noeviction\n"
pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_batches_go_on_after_sentinels_have_failed_over(tmp_path: Path) -> None:
    with watched_pair(tmp_path / "redis", num_sentinels=3, more=DURABLE) as (primary, _, url):
        ring = RingByHand(
            tmp_path,
            url,
            f"broker.endpoint=tcp://127.0.0.1:{free_port()}",
            f"run.steps={STEPS}",
            "run.eval_every=0",
            "run.eval_episodes=0",
            "learner.checkpoint_every=5",
        )
        try:
            ring.start("broker", "broker")
            learner = ring.start("learner", "learner")
            for number in range(2):
                ring.start(f"actor-{number}", "actors")
            ring.until(lambda: ring.version() >= 7, "the run trains")

            primary.send_signal(signal.SIGKILL)
            killed_at = len(ring.rows("first", "metrics"))
            paused_s = ring.until(
                lambda: len(ring.rows("first", "metrics")) >= killed_at + 2,
                "batches at the new primary",
                GO_ON_S,
            )
            print(f"the second batch after the primary was killed came {paused_s:.1f} s later")
            assert learner.wait(240) == 0, ring.logs()
            assert any("LOST WRITES" in line["event"] for line in ring.log("learner"))
            assert_one_history(ring, STEPS, "first")
        finally:
            ring.close()
