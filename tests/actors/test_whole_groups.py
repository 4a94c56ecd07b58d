"""Rewards that rank: all answers to one prompt in one call, whatever the actor's room is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from actors.engine.engine import Delta
from actors.episodes.held_leases import HeldLease, HeldLeases, LeaseStage, SwapGate
from actors.episodes.maker import EpisodeMaker
from actors.episodes.outbox import Outbox
from actors.episodes.scoring import GroupCollector, Scoring
from actors.rewards.functions import Convention, RewardSample, recognise
from actors.rewards.pool import RewardPool
from actors.rewards.process import RewardProcess
from broker.protocol.messages import Lease, TaskSpec
from broker.transport.keys import make_keys
from buffer import operations
from buffer.record.codec import decode_episode
from configs.errors import RewardError, SettingsError
from tests.actors.support.fake_actor import Actor
from tests.broker.support.ring import GROUP, Ring, begin, ring, until_stats
from tests.waiting import until

RANK = """
import json
def rank(prompts, completions, index, **kwargs):
    with open({calls!r}, "a") as file:
        file.write(json.dumps(index) + "\\n")
    return [float(place) for place, _ in enumerate(completions)]
rank.whole_groups = True
"""
POINTER = {"digest": "d", "endpoint": "tcp://127.0.0.1:1", "public_key": "k" * 40}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def member(task_id: int, size: int = 4) -> HeldLease:
    spec = TaskSpec(task_id // size, 0, 0, "train", 1.0)
    return HeldLease(Lease(task_id, 1, spec, 0), 0, 0.0, 0.0, stage=LeaseStage.WAITING)


def ids(groups: Sequence[Sequence[HeldLease]]) -> list[list[int]]:
    return [[held.lease.task_id for held in group] for group in groups]


def gathering() -> tuple[GroupCollector, Clock]:
    clock = Clock()
    return GroupCollector(4, wait_s=60.0, clock=clock), clock


def test_a_group_is_judged_when_its_last_member_is_there_in_the_order_of_its_tasks() -> None:
    waiting, _ = gathering()

    for task_id in (6, 0, 5, 3, 2):
        waiting.add(member(task_id))
        assert waiting.take_groups(most=100) == []
    waiting.add(member(1))

    assert ids(waiting.take_groups(most=100)) == [[0, 1, 2, 3]]
    assert waiting.take_groups(most=100) == []
    assert waiting.num_parts == 0


def test_a_group_that_another_actor_has_a_part_of_waits_for_so_long() -> None:
    waiting, clock = gathering()
    assert waiting.left_s is None
    waiting.add(member(0))
    clock.now = 30.0
    waiting.add(member(4))
    waiting.add(member(2))

    assert waiting.left_s == 30.0
    clock.now = 60.0
    assert waiting.left_s == 0.0
    assert ids(waiting.take_groups(most=100)) == [[0, 2]]
    assert (waiting.left_s, waiting.num_parts) == (30.0, 1)


def test_when_too_many_wait_those_that_waited_longest_go_first() -> None:
    waiting, _ = gathering()
    for task_id in (0, 4, 8, 1):
        waiting.add(member(task_id))

    assert ids(waiting.take_groups(most=2)) == [[0, 1]]
    assert waiting.left_s == 60.0


def test_a_member_whose_lease_went_to_another_actor_is_waited_for_no_longer() -> None:
    waiting, clock = gathering()
    lost, kept = member(0), member(4)
    waiting.add(lost)
    waiting.add(kept)
    lost.stage = LeaseStage.ENDED

    assert waiting.take_groups(most=100) == []
    clock.now = 60.0
    assert ids(waiting.take_groups(most=100)) == [[4]]


def test_a_group_whose_members_are_all_gone_begins_to_wait_anew() -> None:
    waiting, clock = gathering()
    lost = member(0)
    waiting.add(lost)
    waiting.add(member(4))
    lost.stage = LeaseStage.ENDED
    clock.now = 58.0
    waiting.add(member(1))
    assert waiting.left_s == 2.0, "that of the other group"

    clock.now = 60.0
    assert ids(waiting.take_groups(most=100)) == [[4]]
    assert waiting.left_s == 58.0
    clock.now = 118.0
    assert ids(waiting.take_groups(most=100)) == [[1]]


def test_a_function_of_one_sample_cannot_ask_for_groups() -> None:
    def alone(completion: str, answer: str) -> float:
        return 1.0

    def together(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in completions]

    alone.whole_groups = together.whole_groups = True  # type: ignore[attr-defined]

    assert recognise(together, "f") is Convention.GROUP
    with pytest.raises(
        SettingsError, match=r"must take all samples of a group.* got 'f' with \(completion, an"
    ):
        recognise(alone, "f")


@pytest.mark.parametrize("harm", ["1 / 0", "os._exit(3)"])
def test_a_call_that_fails_costs_its_group_and_is_never_made_with_a_part_of_it(
    tmp_path: Path, harm: str
) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "reward.py").write_text(
        "import os\n"
        "def f(completions, **kwargs):\n"
        f"    open({str(calls)!r}, 'a').write(f'{{len(completions)}} ')\n"
        f"    if 'bad' in completions: {harm}\n"
        "    return [float(len(c)) for c in completions]\n"
        "f.whole_groups = True\n"
    )
    samples = [
        RewardSample("1+1=", (7,), text, (1,), "2", 0, "train", 0.0) for text in ("a", "bad", "cc")
    ]

    async def run() -> list[Any]:
        process = RewardProcess(f"{tmp_path / 'reward.py'}:f", timeout_s=20, retries=1)
        await process.start()
        try:
            failed = await process.score(samples)
            return [failed, await process.score([samples[0], samples[2]])]
        finally:
            await process.close()

    failed, fine = asyncio.run(run())

    assert all(isinstance(result, RewardError) for result in failed)
    assert fine == [1.0, 2.0]
    assert calls.read_text() == "3 3 2 "


@pytest.mark.parametrize(("workers", "sizes"), [(1, [40]), (4, [16, 16, 8]), (128, [1] * 40)])
def test_a_function_gets_all_episodes_at_hand_that_its_workers_leave_it(
    workers: int, sizes: list[int]
) -> None:
    """One call for each sample would be right, too, and slower by what a call costs."""
    called: list[int] = []

    class Pool:
        num_workers = workers
        group_size = None

        async def score(self, samples: Sequence[object]) -> list[RewardError]:
            called.append(len(samples))
            return [RewardError("none")] * len(samples)

    class Maker:
        def sample(self, rollout: object) -> object:
            return rollout

    async def run() -> None:
        leases = HeldLeases(SwapGate(hold_s=0.0), heartbeat_s=1.0, clock=Clock())
        outbox = Outbox(cast("Any", None), deadline_s=1.0, max_message_bytes=2**20)
        scoring = Scoring(cast("Any", None), leases=leases, outbox=outbox)
        for task_id in range(40):
            held = leases.hold(Lease(task_id, 1, TaskSpec(0, 0, 0, "train", 1.0), 0))
            leases.begin_work(held, started_at=0.0)
            held.rollout = cast("Any", object())
            scoring._put_finished(held)
        maker, pool = cast("EpisodeMaker", Maker()), cast("RewardPool", Pool())
        judging = asyncio.create_task(scoring.score_episodes(maker, 0, pool))
        await until(lambda: len(outbox) == 40)
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)

    asyncio.run(run())

    assert called == sizes


def in_ring(redis_url: str, folder: Path, story: Any, *, groups: int) -> None:
    async def tell() -> None:
        async with ring(redis_url, make_keys(folder / "keys")) as running:
            await begin(running.store, groups=groups)
            await running.store.run(operations.publish(1, 0, POINTER))
            await until(lambda: running.parts.cache.publication)
            await story(running)

    asyncio.run(asyncio.wait_for(tell(), 60))


def ranking(folder: Path) -> tuple[str, Path]:
    calls = folder / "calls.jsonl"
    (folder / "rewards.py").write_text(RANK.format(calls=str(calls)))
    return f"{folder / 'rewards.py'}:rank", calls


@pytest.mark.parametrize("room", [1, 3, 8], ids=["one place", "one and a half groups", "four"])
def test_every_call_of_a_run_has_one_whole_group(redis_url: str, tmp_path: Path, room: int) -> None:
    reward, path = ranking(tmp_path)

    async def story(running: Ring) -> None:
        actor = Actor(running, "a", reward=reward, max_concurrent_episodes=room)
        await until_stats(running, lambda stats: stats.buffered == 6 * GROUP)
        records = await running.store.run(operations.records(list(range(6 * GROUP))))
        actor.loop.stop()
        await actor.end()

        episodes = [decode_episode(record) for record in records if record is not None]
        for task_id, episode in enumerate(episodes):
            assert episode.reward_parts["rank"] == task_id % GROUP, "members are in order"

    in_ring(redis_url, tmp_path, story, groups=6)

    tried, *calls = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(tried) == 2
    assert sorted(calls) == [[group] * GROUP for group in range(6)]


def test_a_group_of_two_actors_is_judged_in_parts_after_a_while(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward, path = ranking(tmp_path)

    async def story(running: Ring) -> None:
        options: dict[str, Any] = {"reward": reward, "group_wait_s": 0.5}
        a = Actor(running, "a", max_concurrent_episodes=1, **options)
        a.engine.flowing.clear()  # it has the first member, and does not finish
        await until(lambda: a.engine.submitted)
        b = Actor(running, "b", max_concurrent_episodes=1, **options)
        await until_stats(running, lambda stats: stats.buffered == 1)
        a.engine.flowing.set()
        await until_stats(running, lambda stats: stats.buffered == GROUP)
        for actor in (a, b):
            actor.loop.stop()
            await actor.end()

    in_ring(redis_url, tmp_path, story, groups=1)

    assert [json.loads(line) for line in path.read_text().splitlines()][2:] == [[0], [0]]
    assert "a group is scored in parts" in capsys.readouterr().out


def test_a_drain_gives_back_those_that_wait_with_their_tokens(
    redis_url: str, tmp_path: Path
) -> None:
    reward, path = ranking(tmp_path)

    async def story(running: Ring) -> None:
        first = Actor(running, "a", reward=reward, max_concurrent_episodes=1)
        deltas = first.engine.deltas

        def one_waits() -> bool:
            return any(held.stage is LeaseStage.WAITING for held in first.loop._leases)

        async def until_one_waits() -> list[Delta]:
            if one_waits():  # else the others of its group end before anybody looks
                await asyncio.Event().wait()
            return await deltas()

        first.engine.deltas = until_one_waits  # type: ignore[method-assign]
        await until(one_waits)
        first.loop.stop()
        await first.end()
        second = Actor(running, "b", reward=reward)
        await until_stats(running, lambda stats: stats.buffered == GROUP)
        second.loop.stop()
        await second.end()

    in_ring(redis_url, tmp_path, story, groups=1)

    assert [0] * GROUP in [json.loads(line) for line in path.read_text().splitlines()]
