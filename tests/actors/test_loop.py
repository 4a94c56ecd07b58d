"""The actor's loop against a real broker over a real Redis; only the model is fake."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from actors.engine.engine import Delta
from actors.environments.base import Conversation
from actors.environments.calculator import Calculator
from actors.environments.calls import EnvironmentSource
from actors.loop import ActorPhase
from broker.protocol.messages import Failure
from broker.transport.allow_list import TAG
from broker.transport.keys import make_keys
from buffer import operations
from buffer.operations.values import BeatLine
from buffer.record.codec import decode_episode, encode_completion
from buffer.record.episode import Episode, PolicyVersion
from configs.errors import DeadlineError, EngineDied, EngineError, RefusedError, SettingsError
from tests.actors.support.fake_actor import Actor, KilledLoop, solve
from tests.actors.support.fake_engine import CharacterTokenizer, FakeEngine, hang_after
from tests.broker.support.records import completion
from tests.broker.support.ring import (
    FIRST,
    GROUP,
    Ring,
    begin,
    create,
    pair_of,
    ring,
    until_parked,
    until_stats,
)
from tests.waiting import until

POINTER = {"digest": "d", "endpoint": "tcp://127.0.0.1:1", "public_key": "k" * 40}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("run") / "keys")


def in_ring(redis_url, keys, story, *, groups=4, vocabulary=None, **broker):
    """Tell a story in a ring whose run has begun and whose weights are published."""

    async def tell():
        async with ring(redis_url, keys, **broker) as running:
            await begin(running.store, groups=groups, vocabulary=vocabulary)
            await running.store.run(operations.publish(1, 0, POINTER))
            await until(lambda: running.parts.cache.publication)  # WELCOME has it
            await story(running)

    asyncio.run(asyncio.wait_for(tell(), 60))


async def episodes(ring: Ring, count: int) -> list[Episode]:
    records = await ring.store.run(operations.records(list(range(count))))
    return [decode_episode(record) for record in records if record is not None]


def text_of(episode: Episode) -> str:
    return CharacterTokenizer().decode(episode.completion.token_ids.tolist())


@pytest.mark.slow
def test_heartbeats_carry_the_times_of_the_last_version_of_weights(redis_url, keys):
    async def story(ring):
        actor = Actor(ring, "a")

        async def seen() -> list[dict[str, str]]:
            actors = await ring.store.run(operations.actors())
            return [actor.fields for actor in actors if "weight_pause_s" in actor.fields]

        (fields,) = await until(seen)
        await ring.store.run(operations.cancel(1))
        await actor.end()
        assert float(fields["weight_transfer_s"]) == 1.5
        assert float(fields["weight_pause_s"]) == 0.25

    in_ring(redis_url, keys, story, groups=40)


def test_every_task_of_the_run_becomes_a_record_and_done_ends_the_actor(redis_url, keys):
    async def story(ring):
        actor = Actor(ring, "a")
        await until_stats(ring, lambda stats: stats.buffered == 4 * GROUP)
        made = await episodes(ring, 4 * GROUP)
        await ring.store.run(operations.cancel(1))
        await actor.end()

        assert len(made) == 4 * GROUP
        for episode in made:
            assert episode.reward == 1.0
            assert episode.reward_parts == {"exact": 1.0, "used_tool": 1.0}
            assert episode.environment_metrics["num_turns"] == 2
            assert episode.incarnation == "a"
            assert episode.finish_reason == "stop"
            assert 0 in episode.completion.loss_mask
        assert {e.group_id for e in made} == set(range(4))
        assert actor.loop.phase is ActorPhase.BYE
        assert actor.engine.closed
        assert actor.weights.offered[0].endpoint == "tcp://127.0.0.1:1"

    in_ring(redis_url, keys, story)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 6], ids=["within a turn", "between the turns"])
def test_a_killed_actors_episodes_are_continued_where_they_were(redis_url, keys, steps):
    async def story(ring):
        first = Actor(ring, "first", engine=FakeEngine(solve, tokens_per_step=1), kind=KilledLoop)
        hang_after(first.engine, steps)
        await until(lambda: first.loop.sampling.num_tokens >= steps * 2 * GROUP)
        await asyncio.sleep(0.3)  # several snapshots
        first.life.cancel()
        await asyncio.gather(first.life, return_exceptions=True)
        second = Actor(ring, "second")
        await until_stats(ring, lambda stats: stats.buffered == 2 * GROUP)
        made = await episodes(ring, 2 * GROUP)
        second.loop.stop()
        await second.end()

        for episode in made:
            assert [run.incarnation for run in episode.completion.fences] == ["first", "second"]
            assert episode.environment_metrics["resumed_tokens"] > 0
            assert episode.environment_metrics["restarted"] == 0
            assert episode.reward == 1.0

    in_ring(redis_url, keys, story, groups=2, lease_timeout_s=2.0, reap_every_s=0.1)


def test_a_drain_gives_leases_back_with_their_tokens_and_without_an_attempt(redis_url, keys):
    async def story(ring):
        engine = FakeEngine(solve, tokens_per_step=2)
        engine.kept_back = 1
        actor = Actor(ring, "a", engine=engine, snapshot_s=60.0, heartbeat_s=5.0)
        hang_after(engine, 2)
        await until(lambda: actor.loop.sampling.num_tokens > 0)
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        actor.loop.stop()
        await actor.end()
        stats = await ring.store.run(operations.stats())

        assert time.monotonic() - begun < 5
        assert (stats.leased, stats.ready, stats.dead) == (0, 2 * GROUP, 0)
        taken_over = Actor(ring, "b")
        await until_stats(ring, lambda stats: stats.buffered == 2 * GROUP)
        for episode in await episodes(ring, 2 * GROUP):
            assert [run.incarnation for run in episode.completion.fences] == ["a", "b"]
            assert episode.completion.fences[1].start % 2 == 1, "the token that was kept back"
        taken_over.loop.stop()
        await taken_over.end()

    in_ring(redis_url, keys, story, groups=2)


def test_a_drain_delivers_what_has_all_its_tokens(redis_url, keys):
    async def story(ring):
        actor = Actor(ring, "a")
        await until_stats(ring, lambda stats: stats.leased + stats.buffered == 4 * GROUP)
        actor.loop.stop()
        await actor.end()
        stats = await ring.store.run(operations.stats())

        assert stats.leased == 0
        assert stats.ready + stats.buffered == 4 * GROUP

    in_ring(redis_url, keys, story)


def test_a_lease_that_went_to_another_actor_is_aborted_at_once(redis_url, keys):
    async def story(ring):
        engine = FakeEngine(solve)
        engine.flowing.clear()
        actor = Actor(ring, "slow", engine=engine, max_concurrent_episodes=GROUP)
        await until_stats(ring, lambda stats: stats.leased == GROUP)
        await until(lambda: len(engine.submitted) == GROUP)
        await steal(ring, actor)
        await until(lambda: len(engine.aborted) == GROUP)

        assert {r.request_id for r in engine.submitted} == set(engine.aborted)
        assert len(actor.loop._leases) == actor.loop._leases.num_active == 0
        actor.loop.stop()
        await actor.end()

    in_ring(redis_url, keys, story, groups=1)


def test_no_lease_beyond_a_bound_that_changes_is_taken(redis_url, keys):
    async def story(ring):
        engine = FakeEngine(solve)
        engine.flowing.clear()
        beyond: list[int] = []

        def watched(client):
            lease = client.lease

            async def ask(request, **options):
                reply = await lease(request, **options)
                held = actor.loop._leases.num_active + len(reply.leases)
                beyond.append(held - actor.loop.room.most)
                return reply

            client.lease = ask
            return client

        actor = Actor(ring, "a", engine=engine, wrap=watched, max_concurrent_episodes=8 * GROUP)
        actor.loop.room.resize(GROUP)
        await until_stats(ring, lambda stats: stats.leased == GROUP)
        actor.loop.room.resize(3 * GROUP)  # none has ended, and it asks at once
        await until_stats(ring, lambda stats: stats.leased == 3 * GROUP)
        actor.loop.room.resize(2)
        engine.flowing.set()
        await until_stats(ring, lambda stats: stats.buffered == 6 * GROUP)
        actor.loop.stop()
        await actor.end()

        assert max(beyond) == 0
        assert len(beyond) > 3

    in_ring(redis_url, keys, story, groups=6)


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_a_turn_that_the_engine_broke_off_is_not_trained_on(redis_url, keys, reason):
    async def story(ring):
        engine = FakeEngine(solve)
        broken: set[str] = set()
        deltas = engine.deltas

        async def broken_off():
            arrived = await deltas()
            if broken:
                return arrived
            broken.update(delta.request_id for delta in arrived)
            return [replace(delta, finish_reason=reason) for delta in arrived]

        engine.deltas = broken_off  # type: ignore[method-assign]
        failures: list[Failure] = []
        actor = Actor(ring, "a", engine=engine, wrap=lambda client: noting(client, failures))
        await until_stats(ring, lambda stats: stats.buffered == GROUP)
        made = await episodes(ring, GROUP)
        actor.loop.stop()
        await actor.end()

        assert {failure.kind for failure in failures} == {"infrastructure"}
        assert all(repr(reason) in failure.reason for failure in failures)
        assert len(failures) == len(broken) > 0
        assert {episode.finish_reason for episode in made} == {"stop"}

    in_ring(redis_url, keys, story, groups=1)


def noting(client, failures: list[Failure]):
    """A client that notes the failures that pass through it."""
    fail = client.fail

    async def noted(request, **options):
        failures.extend(request.failures)
        return await fail(request, **options)

    client.fail = noted
    return client


@pytest.mark.parametrize("is_finished", [True, False])
def test_tokens_that_the_run_does_not_have_fail_their_tasks_and_not_the_actor(
    redis_url, keys, is_finished
):
    """A tokenizer of another model: its records are refused, and so are its snapshots."""

    async def story(ring):
        engine = FakeEngine(solve, tokens_per_step=10**9 if is_finished else 1)
        failures: list[Failure] = []
        actor = Actor(ring, "a", engine=engine, wrap=lambda client: noting(client, failures))
        if not is_finished:
            hang_after(engine, 2)
        stats = await until_stats(ring, lambda stats: stats.dead == 4 * GROUP)
        assert not actor.life.done()
        letters = await ring.store.run(operations.dead_letters(0, 9))
        actor.loop.stop()
        await actor.end()

        assert stats.leased == stats.buffered == 0
        kind = "record" if is_finished else "snapshot"
        assert {failure.kind for failure in failures} == {"data"}
        assert all(letter.why.startswith(f"{kind} refused: token ids") for letter in letters)
        assert all("vocabulary of run.model = 5, got" in letter.why for letter in letters)

    in_ring(redis_url, keys, story, vocabulary=5, max_data_failures=1)


@pytest.mark.parametrize("fault", ["fence", "length"])
def test_a_partial_that_cannot_be_continued_is_begun_again(redis_url, keys, fault):
    """What is in a store may be older than the checks of its broker."""

    async def story(ring):
        lease = operations.lease("evil", ttl_ms=60_000, n=1, version=FIRST)
        [task] = (await ring.store.run(lease)).tasks
        tokens = 2000 if fault == "length" else 3
        fence = task.fence if fault == "length" else 2**53 - 1
        line = BeatLine(
            task.task_id, task.fence, 0, tokens, encode_completion(completion(fence, tokens))
        )
        await ring.store.run(operations.beat(ttl_ms=60_000, lines=[line]))
        await ring.store.run(operations.release([(task.task_id, task.fence)]))
        actor = Actor(ring, "a", engine=FakeEngine(solve, tokens_per_step=1))
        await until_stats(ring, lambda stats: stats.buffered == GROUP)
        made = await episodes(ring, GROUP)
        actor.loop.stop()
        await actor.end()

        assert [episode.environment_metrics["restarted"] for episode in made] == [1.0, 0.0]

    in_ring(redis_url, keys, story, groups=1)


def test_a_request_that_the_engine_refuses_fails_its_task(redis_url, keys):
    async def story(ring):
        engine = FakeEngine(solve)
        deltas = engine.deltas

        async def refusing():
            return [
                replace(delta, token_ids=(), logprobs=(), finish_reason="refused", refusal="bad id")
                for delta in await deltas()
            ]

        engine.deltas = refusing  # type: ignore[method-assign]
        failures: list[Failure] = []
        actor = Actor(ring, "a", engine=engine, wrap=lambda client: noting(client, failures))
        await until_stats(ring, lambda stats: stats.dead == GROUP)
        actor.loop.stop()
        await actor.end()

        assert {(failure.kind, failure.reason) for failure in failures} == {("data", "bad id")}

    in_ring(redis_url, keys, story, groups=1)


async def steal(ring: Ring, actor: Actor) -> None:
    """Give every lease of the actor `slow` back behind its back and take it for another."""
    stolen, tag = 0, pair_of(ring.keys, "slow").public.decode()[:TAG]
    while stolen < GROUP:  # a heartbeat in between revives what nobody has taken yet
        await ring.store.run(
            operations.release(
                [(held.lease.task_id, held.lease.fence) for held in actor.loop._leases], tag
            )
        )
        taken = await ring.store.run(
            operations.lease("thief", ttl_ms=60_000, n=GROUP, version=FIRST)
        )
        stolen += len(taken.tasks)


def test_an_item_that_cannot_be_made_ends_in_the_dead_letters(redis_url, keys):
    async def story(ring):
        actor = Actor(ring, "a", run={"max_prompt_tokens": 2})
        stats = await until_stats(ring, lambda stats: stats.dead == GROUP)
        actor.loop.stop()
        await actor.end()

        assert stats.buffered == 0
        assert actor.engine.submitted == []

    in_ring(redis_url, keys, story, groups=1)


@pytest.mark.slow
def test_a_reward_function_judges_and_what_it_refuses_is_dead(redis_url, keys, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def f(completions, answer, index, environment_reward, **kwargs):\n"
        "    return [float('nan') if i == 0 else e + len(a) for i, a, e\n"
        "            in zip(index, answer, environment_reward)]\n"
    )

    async def story(ring):
        actor = Actor(ring, "a", reward=f"{path}:f")
        stats = await until_stats(ring, lambda s: s.dead == GROUP and s.buffered == 2 * GROUP)
        made = await episodes(ring, 3 * GROUP)
        actor.loop.stop()
        await actor.end()

        assert stats.leased == 0
        assert len(made) == 2 * GROUP
        for episode in made:
            assert episode.reward == 1.0 + len(episode.metadata["answer"])
            assert episode.reward_parts["environment"] == 1.0

    in_ring(redis_url, keys, story, groups=3)


class Waiting:
    """The calculator behind a network."""

    async def begin(self, index: int, seed: int, *, held_out: bool) -> Conversation:
        await asyncio.sleep(0)
        return Calculator().begin(index, seed, held_out=held_out)


@pytest.mark.slow
def test_tasks_of_several_environments_are_asked_and_judged_in_their_own(redis_url, keys, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def f(completion, index, data_source):\n"
        "    return 100 + index if data_source == 'waiting' else -1\n"
    )
    run = {
        "environments": [
            {"name": "plain", "environment": "calculator", "share": 2},
            {"name": "waiting", "environment": "calculator", "reward": f"{path}:f"},
        ]
    }
    waiting: Any = Waiting
    sources = [EnvironmentSource(Calculator, is_shared=True), EnvironmentSource(waiting, True)]

    async def story(ring):
        actor = Actor(ring, "a", run=run, environments=sources)
        await until_stats(ring, lambda stats: stats.buffered == 12 * GROUP)
        made = await episodes(ring, 12 * GROUP)
        actor.loop.stop()
        await actor.end()

        mixture, calculator = actor.settings.run.mixture, Calculator()
        places = {group: mixture.training(group) for group in range(12)}
        assert Counter(place.environment for place in places.values()) == {0: 8, 1: 4}
        for episode in made:
            environment, index = places[episode.group_id]
            prompt = CharacterTokenizer().decode(episode.prompt_ids.tolist())
            assert prompt == calculator.begin(index, 0, held_out=False).prompt
            assert episode.reward == (100 + index if environment else 1.0)

    in_ring(redis_url, keys, story, groups=12)


@pytest.mark.slow
def test_a_reward_that_hangs_or_crashes_does_not_stop_generation(redis_url, keys, tmp_path):
    path, release, tried = (tmp_path / name for name in ("reward.py", "release", "tried"))
    path.write_text(
        "import os, pathlib, time\n"
        "def f(completion, index):\n"
        f"    if not pathlib.Path({str(tried)!r}).exists(): return 1.0\n"
        f"    while not pathlib.Path({str(release)!r}).exists(): time.sleep(0.01)\n"
        "    return 1.0 if index else os._exit(3)\n"
    )

    class Tried(Actor):
        async def _prepare(self):
            tools = await super()._prepare()
            tried.touch()
            return tools

    async def story(ring):
        actor = Tried(ring, "a", reward=f"{path}:f", reward_workers=2, reward_retries=0)
        await until(lambda: len(actor.engine.submitted) >= 3 * GROUP)
        waiting = await ring.store.run(operations.stats())
        release.touch()
        stats = await until_stats(ring, lambda s: s.dead == GROUP and s.buffered == 2 * GROUP)
        made = await episodes(ring, 3 * GROUP)
        actor.loop.stop()
        await actor.end()

        assert (waiting.buffered, waiting.dead) == (0, 0)
        assert stats.leased == 0
        assert {episode.reward_parts["f"] for episode in made} == {1.0}

    in_ring(redis_url, keys, story, groups=3)


def test_the_death_of_the_engine_ends_the_actor_and_frees_its_leases(redis_url, keys):
    async def story(ring):
        engine = FakeEngine(solve)

        async def die():
            await until(lambda: engine.submitted)
            raise EngineError("the engine died: out of memory")

        engine.deltas = die  # type: ignore[method-assign]
        actor = Actor(ring, "a", engine=engine)
        with pytest.raises(EngineError, match="out of memory"):
            await actor.end()
        stats = await ring.store.run(operations.stats())

        assert (stats.leased, stats.ready) == (0, 4 * GROUP)

    in_ring(redis_url, keys, story)


def test_a_dead_engine_costs_no_token_that_it_handed_over_and_no_attempt(redis_url, keys):
    async def story(ring):
        engine = FakeEngine(solve, tokens_per_step=3)
        made = engine.deltas
        given: list[Delta] = []

        async def once():
            if len(given) >= 2 * GROUP:
                raise EngineDied("the process of vLLM's core must keep running, got its exit")
            given.extend(deltas := await made())
            return deltas

        engine.deltas = once  # type: ignore[method-assign]
        actor = Actor(ring, "a", engine=engine, snapshot_s=60.0, heartbeat_s=5.0)
        with pytest.raises(EngineDied, match="got its exit"):
            await actor.end()
        left = (await ring.store.run(operations.inspect(list(range(2 * GROUP))))).values()

        assert {(task.state, task.attempts) for task in left} == {("R", 0)}
        assert sum(task.length for task in left) == sum(len(delta.token_ids) for delta in given)

    in_ring(redis_url, keys, story, groups=2)


@pytest.mark.slow
def test_a_broker_that_is_gone_for_long_ends_the_actor_with_a_clear_error(redis_url, keys):
    async def tell():
        async with ring(redis_url, keys) as running:
            await begin(running.store, groups=1)
            await running.store.run(operations.publish(1, 0, POINTER))
            actor = Actor(running, "a", give_up_s=1.0)
            await until_stats(running, lambda stats: stats.buffered == GROUP)
            running.clients.remove(actor.client)  # it outlives this broker
        with pytest.raises(DeadlineError, match="check that the broker runs"):
            await actor.end(15)
        await actor.client.close()

    asyncio.run(asyncio.wait_for(tell(), 60))


FOR_EVER_S = 3600.0


async def holding(running, **settings):
    """Begin an actor that holds leases in mid-episode, and outlives the broker."""
    await begin(running.store, groups=1)
    await running.store.run(operations.publish(1, 0, POINTER))
    engine = FakeEngine(solve, tokens_per_step=2)
    actor = Actor(running, "a", engine=engine, **settings)
    hang_after(engine, 2)
    await until(lambda: actor.loop.sampling.num_tokens > 0)
    running.clients.remove(actor.client)
    return actor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drain_s", "gone_after_s"),
    [(FOR_EVER_S, 0.5), (1.0, FOR_EVER_S)],
    ids=["no broker is connected", "it does not answer"],
)
def test_an_actor_takes_no_leave_of_a_broker_that_was_told_to_stop_before_it(
    redis_url, keys, monkeypatch, drain_s, gone_after_s
):
    monkeypatch.setattr("actors.loop.GONE_SHARE", gone_after_s / drain_s)
    phases = []

    async def tell():
        async with ring(redis_url, keys) as running:
            actor = await holding(running, drain_s=drain_s)
            beat = actor.client.beat

            async def note(request, **given):
                phases.append(actor.loop.phase)
                return await beat(request, **given)

            actor.client.beat = note
        actor.loop.stop()
        await actor.end(15)
        await actor.client.close()

    asyncio.run(asyncio.wait_for(tell(), 60))

    assert ActorPhase.DRAINING in phases
    assert ActorPhase.BYE not in phases


@pytest.mark.slow
def test_a_drain_that_meets_a_broker_between_two_lives_gives_leases_to_the_next(redis_url, keys):
    async def tell():
        async with ring(redis_url, keys) as before:
            actor = await holding(before, drain_s=FOR_EVER_S)
        actor.loop.stop()
        await until(lambda: actor.loop.phase is ActorPhase.DRAINING)
        async with ring(redis_url, keys, endpoint=before.endpoint) as after:
            await actor.end(30)
            await actor.client.close()
            stats = await after.store.run(operations.stats())

        assert (stats.leased, stats.ready, stats.dead) == (0, GROUP, 0)

    asyncio.run(asyncio.wait_for(tell(), 60))


def test_an_actor_of_other_settings_is_refused_by_name(redis_url, keys):
    async def story(ring):
        actor = Actor(ring, "a")
        actor.loop._hello.hashes["environment"] = "another"
        with pytest.raises(RefusedError, match=r"environment must be the run's, e1"):
            await actor.end()

    in_ring(redis_url, keys, story)


def test_a_stop_before_the_first_lease_ends_the_actor(redis_url, keys):
    async def story(ring):
        engine = FakeEngine(solve)
        starting = asyncio.Event()

        async def start():
            starting.set()
            await asyncio.Event().wait()

        engine.start = start  # type: ignore[method-assign]
        actor = Actor(ring, "a", engine=engine)
        await asyncio.wait_for(starting.wait(), 30)
        actor.loop.stop()
        await actor.end(5)

        assert actor.loop.phase is ActorPhase.BYE

    in_ring(redis_url, keys, story)


def test_an_engine_is_loaded_before_the_broker_has_answered(redis_url, keys):
    async def story(ring):
        engine = FakeEngine(solve)
        has_started = asyncio.Event()
        start = engine.start

        async def started():
            await start()
            has_started.set()

        engine.start = started  # type: ignore[method-assign]
        actor = Actor(ring, "a", engine=engine)
        hello = actor.client.hello

        async def late(request, **given):
            await asyncio.wait_for(has_started.wait(), 30)
            return await hello(request, **given)

        actor.client.hello = late
        await until_stats(ring, lambda stats: stats.buffered == 4 * GROUP)
        actor.loop.stop()
        await actor.end()

    in_ring(redis_url, keys, story)


def test_what_is_not_there_before_the_run_has_begun_is_loaded_after_it(redis_url, keys):
    async def story(ring):
        actor = Actor(ring, "a")
        hello, prepare = actor.client.hello, actor.loop._prepare
        failed = asyncio.Event()

        async def late(request, **given):
            await asyncio.wait_for(failed.wait(), 30)
            return await hello(request, **given)

        async def missing():
            actor.loop._prepare = prepare
            failed.set()
            raise SettingsError("run.model must be a directory, got none")

        actor.client.hello, actor.loop._prepare = late, missing
        await until_stats(ring, lambda stats: stats.buffered == 4 * GROUP)
        actor.loop.stop()
        await actor.end()

    in_ring(redis_url, keys, story)


def test_what_is_not_there_in_a_run_that_has_begun_ends_the_actor(redis_url, keys):
    async def story(ring):
        actor = Actor(ring, "a")

        async def missing():
            raise SettingsError("run.model must be a directory, got none")

        actor.loop._prepare = missing
        with pytest.raises(SettingsError, match="got none"):
            await actor.end()

    in_ring(redis_url, keys, story)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_stop_ends_an_actor_whose_broker_does_not_answer(redis_url, keys, is_loaded):
    async def story(ring):
        engine = FakeEngine(solve)
        starting = asyncio.Event()

        async def start():
            starting.set()
            if not is_loaded:
                await asyncio.Event().wait()

        engine.start = start  # type: ignore[method-assign]
        actor = Actor(ring, "a", engine=engine)

        async def never(_, **__):
            await asyncio.Event().wait()

        actor.client.hello = never
        await asyncio.wait_for(starting.wait(), 30)
        actor.loop.stop()
        await actor.end(5)

        assert actor.loop.phase is ActorPhase.BYE

    in_ring(redis_url, keys, story)


def test_work_that_comes_later_is_found(redis_url, keys):
    async def story(ring):
        actor = Actor(ring, "a")
        await until_parked(ring)
        await create(ring.store, range(3))
        await until_stats(ring, lambda stats: stats.buffered == 3 * GROUP)
        actor.loop.stop()
        await actor.end()

    in_ring(redis_url, keys, story, groups=0)


def test_new_weights_are_let_in_at_once_not_after_the_long_poll(redis_url, keys):
    """The broker judges a waiting request by the version that it was sent with."""

    async def story(ring):
        await ring.store.run(operations.advance(1, 1))
        actor = Actor(ring, "a")
        await until_parked(ring)
        assert (await ring.store.run(operations.stats())).buffered == 0, "a version behind at lag 0"

        await ring.store.run(operations.publish(1, 1, {**POINTER, "digest": "e"}))
        actor.engine.version = PolicyVersion(1, 1)
        actor.weights.news.set()
        await until_stats(ring, lambda stats: stats.buffered == 4 * GROUP, timeout_s=5)
        actor.loop.stop()
        await actor.end()

    in_ring(redis_url, keys, story, long_poll_s=30)
