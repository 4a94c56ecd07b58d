"""Environments side by side: how many steps are under way at once, and what a slow one costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from actors.environments.base import Environment, Score, Segment, Step
from actors.environments.calls import EnvironmentCall, EnvironmentLanes, EnvironmentSource
from actors.episodes.environment_workers import EnvironmentWorkers
from actors.episodes.held_leases import HeldLease
from actors.episodes.maker import EpisodeMaker
from actors.episodes.rollout import Rollout
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError
from configs.settings import ActorSettings, RunSettings
from configs.user_code import explain
from tests.actors.support.fake_engine import STOP, CharacterTokenizer, sample

SPEC = TaskSpec(group_id=0, index=0, seed=0, purpose="train", temperature=1.0)


class Base:
    """An environment whose conversations are itself; each class below has a `step`."""

    prompt = "p"
    answer = None
    demonstration: tuple[Segment, ...] = ()
    made: list[Base]

    def __init_subclass__(cls) -> None:
        cls.made = []

    def __init__(self) -> None:
        self.made.append(self)

    def begin(self, index: int, seed: int, *, held_out: bool) -> Any:
        return self

    def describe(self) -> str:
        return "base"

    def score(self) -> Score:
        return Score(1.0)


async def play(
    kind: type[Any], *, episodes: int, limit_s: float = 20.0, **options: Any
) -> list[Any]:
    """Begin episodes, end their first turns, and return what the environment made of these."""
    settings = {"environment_workers": 8, "environment_timeout_s": limit_s} | options
    workers = EnvironmentWorkers(ActorSettings(**settings))
    first = kind()
    workers.open([EnvironmentSource.from_environment(first, first, kind)])
    maker = EpisodeMaker(CharacterTokenizer(), RunSettings(model="-"), "me", limit_s=limit_s)
    serving = asyncio.create_task(workers.serve())
    helds = [HeldLease(Lease(n, 1, SPEC, 0), 0, 0.0, 0.0) for n in range(episodes)]
    try:
        rollouts = await _all(
            workers, helds, [partial(maker.begin_episode, held.lease) for held in helds]
        )
        for rollout in rollouts:
            rollout.append_delta(sample(lambda _: STOP, rollout.request(), PolicyVersion(1, 1)))
        return await _all(workers, helds, [_judging(rollout) for rollout in rollouts])
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def _judging(rollout: Rollout) -> Callable[[Environment], Any]:
    return lambda _: rollout.judge()


async def _all(workers: EnvironmentWorkers, helds: list[HeldLease], works: list[Any]) -> list[Any]:
    results: list[asyncio.Future[Any]] = [asyncio.get_running_loop().create_future() for _ in helds]
    for held, work, result in zip(helds, works, results, strict=True):
        workers.submit_work(held, work, result.set_result)
    return await asyncio.wait_for(asyncio.gather(*results), 30)


def run(kind: type[Any], **options: Any) -> list[Any]:
    return asyncio.run(play(kind, **options))


def test_steps_of_threads_are_under_way_together():
    together = threading.Barrier(8)

    class Slow(Base):
        def step(self, text: str) -> Step:
            together.wait(15)
            return Step()

    judged = run(Slow, episodes=16)

    assert all(each.finish_reason == "stop" for each in judged), judged
    assert len(Slow.made) <= 8 + 1, "one for each thread, and the sample"


def test_a_class_that_is_not_thread_safe_is_entered_by_its_own_thread_only():
    class Careful(Base):
        thread: int | None = None

        def begin(self, index: int, seed: int, *, held_out: bool) -> Any:
            self._here()
            return super().begin(index, seed, held_out=held_out)

        def step(self, text: str) -> Step:
            self._here()
            return Step()

        def _here(self) -> None:
            assert self.thread in (None, threading.get_ident())
            self.thread = threading.get_ident()

    judged = run(Careful, episodes=64, environment_workers=4)

    assert [each.finish_reason for each in judged] == ["stop"] * 64
    assert len({each.thread for each in Careful.made if each.thread}) == 4  # type: ignore[attr-defined]


def test_a_thread_safe_class_is_made_once_for_as_many_threads_as_are_busy():
    together = threading.Barrier(6)

    class Safe(Base):
        is_thread_safe = True

        def step(self, text: str) -> Step:
            together.wait(15)
            return Step()

    judged = run(Safe, episodes=6)

    assert all(each.finish_reason == "stop" for each in judged), judged
    assert len(Safe.made) <= 2


@pytest.mark.parametrize(
    ("calls", "most", "started"),
    [(1, 4, 1), (3, 8, 3), (6, 2, 2)],
    ids=["nothing waits", "as many as wait", "as many as may be"],
)
def test_a_thread_is_started_only_for_calls_that_wait_and_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch, calls: int, most: int, started: int
) -> None:
    monkeypatch.setattr("actors.environments.calls.BUSY_S", 0.0)
    release, done = threading.Event(), threading.Semaphore(0)
    lanes = EnvironmentLanes(Base, num_threads=most, is_shared=True)
    lane = lanes.next_lane()

    def wait_until_all_are_busy() -> None:
        for thread in lane.threads:
            while thread.call is None and not lane.calls.empty():
                release.wait(0.001)

    for _ in range(calls):
        call = EnvironmentCall(lambda _: release.wait(20), lambda _: done.release(), limit_s=20.0)
        lanes.put_call(call, lane)
    for _ in range(2 * calls):
        wait_until_all_are_busy()
        lanes.watch()

    assert len(lane.threads) == started
    release.set()
    assert all(done.acquire(timeout=20) for _ in range(calls))
    lanes.close()


def test_async_steps_wait_together_however_many_they_are():
    together = asyncio.Barrier(256)

    class Waiting(Base):
        async def step(self, text: str) -> Step:
            await together.wait()
            return Step()

        async def score(self) -> Score:  # type: ignore[override]
            return Score(2.0)

    judged = run(Waiting, episodes=256, environment_workers=1)

    assert {each.score.reward for each in judged} == {2.0}


def test_a_step_that_fails_ends_its_episode_and_names_its_line():
    class Broken(Base):
        def step(self, text: str) -> Step:
            raise KeyError("tool")

    (judged,) = run(Broken, episodes=1)

    assert explain(judged).startswith("KeyError: 'tool', at ")
    assert 'raise KeyError("tool")' in explain(judged)


class Hangs(Base):
    begun = 0
    ended = threading.Event()

    def step(self, text: str) -> Step:
        Hangs.begun += 1
        if Hangs.begun == 1:
            self.ended.wait(20)  # no end
        return Step()


class AsyncHangs(Base):
    begun = 0

    async def step(self, text: str) -> Step:
        AsyncHangs.begun += 1
        if AsyncHangs.begun == 1:
            await asyncio.sleep(20)  # no end
        return Step()


class Blocks(Base):
    begun = 0
    ended = threading.Event()

    async def step(self, text: str) -> Step:
        Blocks.begun += 1
        if Blocks.begun == 2:
            self.ended.wait(20)  # no end
        return Step()


@pytest.mark.parametrize("kind", [Hangs, AsyncHangs])
def test_an_overdue_step_ends_its_episode_alone_and_names_its_line(kind):
    judged = run(kind, episodes=5, limit_s=1.0, environment_workers=1)
    Hangs.ended.set()

    late, *others = judged
    assert isinstance(late, DeadlineError)
    assert "run.environment must answer within 1 s, got no answer, at " in str(late)
    assert "(20)  # no end`" in str(late)
    assert [each.finish_reason for each in others] == ["stop"] * 4


def test_a_step_that_blocks_its_event_loop_is_named():
    judged = run(Blocks, episodes=3, limit_s=1.0)
    Blocks.ended.set()

    late = [each for each in judged if isinstance(each, DeadlineError)]
    assert late
    assert all("self.ended.wait(20)  # no end`" in str(each) for each in late)


def test_an_environment_that_always_hangs_is_given_up():
    class Dead(Base):
        ended = threading.Event()

        def step(self, text: str) -> Step:
            self.ended.wait(30)
            return Step()

    async def story() -> None:
        settings = ActorSettings(environment_workers=1, environment_timeout_s=0.2)
        workers = EnvironmentWorkers(settings)
        first = Dead()
        workers.open([EnvironmentSource.from_environment(first, first, Dead)])
        for number in range(8):
            held = HeldLease(Lease(number, 1, SPEC, 0), 0, 0.0, 0.0)
            workers.submit_work(held, _stepping, lambda _: None)
        await asyncio.wait_for(workers.serve(), 20)

    async def _stepping(environment: Environment) -> None:
        environment.begin(0, 0, held_out=False).step("")

    with pytest.raises(DeadlineError, match="4 of its threads never end"):
        asyncio.run(story())
    Dead.ended.set()
