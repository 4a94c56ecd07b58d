"""Redis is killed, set back by seconds, and wiped under a living learner: nothing is trained twice.

The learner is the real loop, the server a real one with its log on disk; the actor is a thread, so
that a run takes seconds. Whole processes under the same faults: `nyala chaos`.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer import operations
from buffer.operations.values import Stats
from buffer.record.episode import PolicyVersion
from buffer.store import Store
from configs.errors import StoreRestarted
from configs.settings import Settings
from learner.model.ranks import Ranks
from tests.learner.support.rewinding_redis import RewindingRedis, rewinding_redis
from tests.learner.support.ring_in_process import LifeEnded, RingInProcess
from tests.learner.support.tiny_run import tiny_settings

pytestmark = pytest.mark.slow

STEPS, BATCH = 12, 16  # tasks


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RewindingRedis]:
    with rewinding_redis(tmp_path / "redis") as running:
        yield running


def ring_of(server: RewindingRedis, folder: Path, ranks: Ranks) -> RingInProcess:
    settings = tiny_settings(
        folder,
        run={"groups_per_batch": 4, "steps": STEPS, "eval_every": 4, "eval_episodes": 4},
        learner={"checkpoint_every": 5, "eval_timeout_s": 5},
    )
    return RingInProcess(settings, server.url, ranks, patience_s=20.0)


def lines(settings: Settings, name: str) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (settings.run.folder / f"{name}.jsonl").read_text().splitlines()]


def assert_one_history(ring: RingInProcess) -> Stats:
    """Steps without a hole, no group in two batches, every task with one end."""
    batches = lines(ring.settings, "batches")
    assert [line["step"] for line in batches] == list(range(1, STEPS + 1))
    groups = [group for line in batches for group in line["group_ids"]]
    assert len(groups) == len(set(groups)) == STEPS * 4
    with Store(ring.url, ring.settings.run.name) as store:
        stats = store.run(operations.stats())
    assert (stats.state, stats.committed, stats.dead) == ("ENDED", STEPS * BATCH, 0)
    assert stats.created == stats.committed + sum(stats.dropped.values()) + stats.cancelled
    return stats


def test_a_killed_redis_is_waited_for(server: RewindingRedis, tmp_path: Path, ranks: Ranks) -> None:
    ring = ring_of(server, tmp_path, ranks)
    ring.shelf.on_publish = lambda step: server.restart() if step in (3, 4, 9) else None

    assert ring.live()

    assert assert_one_history(ring).lineage == 1


@pytest.mark.parametrize("seed", [1, 2])
def test_a_redis_that_loses_its_last_seconds_again_and_again_is_put_right(
    server: RewindingRedis, tmp_path: Path, ranks: Ranks, seed: int
) -> None:
    ring, chance = ring_of(server, tmp_path, ranks), random.Random(seed)
    pasts: list[Path] = []
    losses: list[threading.Timer] = []

    def nemesis(step: int) -> None:
        """Go back by up to three batches, at some moment of the next ones."""
        pasts.append(server.remember())
        if step % 2 == 0 and step < STEPS:
            past = pasts[-chance.randint(1, min(4, len(pasts)))]
            losses.append(threading.Timer(0.04 * chance.random(), server.restart, (past,)))
            losses[-1].start()

    ring.shelf.on_publish = nemesis

    assert ring.live()

    for loss in losses:
        loss.join()
    assert len(losses) == STEPS // 2
    assert_one_history(ring)
    evaluated = [line["step"] for line in lines(ring.settings, "eval")]
    assert sorted(evaluated) == [0, 4, 8, 12], "once each; one created again may end after the next"


def test_a_redis_wiped_under_the_learner_is_filled_again(
    server: RewindingRedis, tmp_path: Path, ranks: Ranks
) -> None:
    ring = ring_of(server, tmp_path, ranks)
    ring.shelf.on_publish = lambda step: server.wipe() if step in (2, 7) else None

    assert ring.live()

    stats = assert_one_history(ring)
    assert stats.lineage == 1, "the learner keeps the lineage that the store forgot"


def lives_that_end_at(ring: RingInProcess, *steps: int) -> None:
    for step in steps:
        ring.shelf.end_life_at = step
        with pytest.raises(LifeEnded):
            ring.live()


def test_a_store_that_forgot_the_learners_lineage_gets_it_back(
    server: RewindingRedis, tmp_path: Path, ranks: Ranks
) -> None:
    ring = ring_of(server, tmp_path, ranks)
    pasts: dict[int, Path] = {}

    def remember(step: int) -> None:
        pasts[step] = server.remember()

    ring.shelf.on_publish = remember
    lives_that_end_at(ring, 3, 7)  # lineages 1 and 2; the checkpoint is of step 5

    def go_back(step: int) -> None:
        if step == 9:
            server.restart(pasts[2])  # of lineage 1, before the first checkpoint

    ring.shelf.on_publish = go_back
    assert ring.live()

    assert assert_one_history(ring).lineage == 3
    assert PolicyVersion(3, STEPS) in ring.shelf.history


@pytest.mark.parametrize("fault", ["rewound", "wiped"])
def test_a_store_that_lost_writes_while_no_learner_lived_is_put_right_by_the_next(
    server: RewindingRedis, tmp_path: Path, ranks: Ranks, fault: str
) -> None:
    ring = ring_of(server, tmp_path, ranks)
    pasts: dict[int, Path] = {}

    def remember(step: int) -> None:
        pasts[step] = server.remember()

    ring.shelf.on_publish = remember
    lives_that_end_at(ring, 8)
    trained = {line["step"]: line["group_ids"] for line in lines(ring.settings, "batches")}
    faults: dict[str, Callable[[], None]] = {
        "rewound": lambda: server.restart(pasts[3]),
        "wiped": server.wipe,
    }
    faults[fault]()

    assert ring.live()

    stats = assert_one_history(ring)
    assert stats.lineage == 2, "not the first one again, which actors have seen"
    after = {line["step"]: line["group_ids"] for line in lines(ring.settings, "batches")}
    assert all(after[step] == trained[step] for step in range(1, 6)), "the checkpoint's batches"


@pytest.mark.parametrize("seed", [3])
def test_deaths_of_the_learner_and_losses_of_the_store_may_come_together(
    server: RewindingRedis, tmp_path: Path, ranks: Ranks, seed: int
) -> None:
    ring, chance = ring_of(server, tmp_path, ranks), random.Random(seed)
    pasts: list[Path] = []
    losses: list[threading.Timer] = []

    def nemesis(step: int) -> None:
        pasts.append(server.remember())
        fate = chance.random()
        if len(losses) < 6 and fate < 0.4:
            past = pasts[-chance.randint(1, min(6, len(pasts)))]
            losses.append(threading.Timer(0.04 * chance.random(), server.restart, (past,)))
            losses[-1].start()
        elif fate < 0.45:
            server.wipe()
        elif fate < 0.65 and step:
            raise LifeEnded

    ring.shelf.on_publish = nemesis
    for _ in range(40):
        with contextlib.suppress(LifeEnded, StoreRestarted):  # whose learner is started again
            if ring.live():
                break

    for loss in losses:
        loss.join()
    assert_one_history(ring)


def test_batches_whose_records_a_wiped_store_forgot_are_replaced_after_a_death(
    server: RewindingRedis, tmp_path: Path, ranks: Ranks
) -> None:
    ring = ring_of(server, tmp_path, ranks)

    def wipe_then_die(step: int) -> None:
        if step == 8:
            server.wipe()
            time.sleep(1.0)  # the feeder notices
            raise LifeEnded

    ring.shelf.on_publish = wipe_then_die
    with contextlib.suppress(LifeEnded):
        ring.live()
    ring.shelf.on_publish = lambda _: None

    assert ring.live()

    dropped = assert_one_history(ring).dropped
    # Batches 6 to 8, and 9 if it was claimed while 8 was handed over.
    assert dropped["forgotten"] + dropped["unreadable"] in (3 * BATCH, 4 * BATCH)
