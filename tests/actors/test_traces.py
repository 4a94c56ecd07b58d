"""Spans of episodes that a real loop makes beside a real broker; only the model is fake."""

from __future__ import annotations

import asyncio

import pytest

from broker.transport.allow_list import TAG
from broker.transport.keys import make_keys
from buffer import operations
from configs.traces import lease_of, root_of
from tests.actors.support.fake_actor import Actor, solve
from tests.actors.support.fake_engine import FakeEngine, hang_after
from tests.broker.support.ring import FIRST, GROUP, begin, pair_of, ring, until_stats
from tests.configs.support.recording import IDS, recording
from tests.waiting import until

POINTER = {"digest": "d", "endpoint": "tcp://127.0.0.1:1", "public_key": "k" * 40}
OF_ACTORS = {"environment", "sample", "judge", "reward", "submit", "fail"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("run") / "keys")


def traced(redis_url, keys, story, **broker):
    """Tell a story of one group in a ring that is traced; returns what was recorded."""

    async def tell(recorded):
        async with ring(redis_url, keys, **broker) as running:
            await begin(running.store, groups=1)
            await running.store.run(operations.publish(1, 0, POINTER))
            await until(lambda: running.parts.cache.publication)
            async with asyncio.timeout(60):
                await story(running, recorded)

    with recording() as recorded:
        asyncio.run(tell(recorded))
        recorded.spans  # noqa: B018 - takes the last ones
    return recorded


async def stop(actor) -> None:
    actor.loop.stop()
    await actor.end()


def test_each_turn_and_the_way_to_the_store_are_phases_of_the_lease(redis_url, keys):
    async def story(ring, _):
        actor = Actor(ring, "a")
        await until_stats(ring, lambda stats: stats.buffered >= GROUP)
        await stop(actor)

    recorded = traced(redis_url, keys, story)

    for task_id in range(GROUP):
        spans = recorded.of_task(task_id)
        phases = [span for span in spans if span.name in OF_ACTORS]
        turn = ["sample", "judge"]
        assert [s.name for s in phases] == ["environment", *turn, *turn, "reward", "submit"]
        (lease,) = [span for span in spans if span.name == "lease"]
        (store,) = [span for span in spans if span.name == "store"]
        assert lease.address == lease_of(IDS.of_task(task_id), lease.attributes["fence"])
        assert lease.parent_id == root_of(IDS.of_task(task_id)).span_id
        assert lease.attributes["actor"] == "a"
        assert {span.parent_id for span in (*phases, store)} == {lease.address.span_id}
        assert store.attributes["verdict"] == phases[-1].attributes["outcome"] == "OK"
        samples = [span.attributes for span in phases if span.name == "sample"]
        assert [each["turn"] for each in samples] == [0, 1]
        assert 0 == samples[0]["first_token"] < samples[0]["end_token"] < samples[1]["first_token"]
        assert phases[-1].attributes["reward"] == 1.0
        assert phases[-1].began_ns <= store.began_ns <= store.ended_ns <= phases[-1].ended_ns


def test_a_lease_that_went_to_another_has_no_span_after_its_refusal(redis_url, keys):
    async def story(ring, recorded):
        engine = FakeEngine(solve)
        engine.flowing.clear()
        actor = Actor(ring, "slow", engine=engine, max_concurrent_episodes=GROUP)
        await until(lambda: len(engine.submitted) == GROUP)
        held = [(held.lease.task_id, held.lease.fence) for held in actor.loop._leases]
        await steal(ring, held)
        await until(lambda: len(engine.aborted) == GROUP)
        ended = [span for span in recorded.spans if span.attributes.get("outcome") == "lost"]
        assert [span.name for span in ended] == ["sample"] * GROUP
        recorded.refused_at = max(span.ended_ns for span in ended)
        recorded.stale = {fence for _, fence in held}
        engine.flowing.set()  # what the engine had of them comes too late
        await asyncio.sleep(0.3)
        await stop(actor)

    recorded = traced(redis_url, keys, story)

    late = [s for s in recorded.spans if s.began_ns >= recorded.refused_at]
    assert not {s.attributes.get("fence") for s in late} & recorded.stale


async def steal(ring, held) -> None:
    """Give every lease of the actor `slow` back behind its back and take it for another."""
    stolen, tag = 0, pair_of(ring.keys, "slow").public.decode()[:TAG]
    while stolen < GROUP:  # a heartbeat in between revives what nobody has taken yet
        await ring.store.run(operations.release(held, tag))
        lease = operations.lease("thief", ttl_ms=60_000, n=GROUP, version=FIRST)
        stolen += len((await ring.store.run(lease)).tasks)


def test_a_drained_episode_shows_its_release_and_goes_on_in_the_same_trace(redis_url, keys):
    async def story(ring, _):
        engine = FakeEngine(solve, tokens_per_step=1)
        engine.flowing.clear()
        hang_after(engine, 3)
        first = Actor(ring, "first", engine=engine)
        await until(lambda: len(engine.submitted) == GROUP)  # in each step from now on
        engine.flowing.set()
        await until(lambda: first.loop.sampling.num_tokens >= 3 * GROUP)
        await stop(first)
        second = Actor(ring, "second")
        await until_stats(ring, lambda stats: stats.buffered >= GROUP)
        await stop(second)

    recorded = traced(redis_url, keys, story)

    for task_id in range(GROUP):
        spans = recorded.of_task(task_id)
        # One that is granted to a request that the actor has given up is released at once.
        own, *_, last = [span for span in spans if span.name == "lease"]
        assert (own.attributes["actor"], last.attributes["actor"]) == ("first", "second")
        assert own.attributes["stored_tokens"] == 0 < last.attributes["stored_tokens"]
        (released,) = [s for s in spans if s.attributes.get("outcome") == "released"]
        assert released.parent_id == own.address.span_id
        resumed = [s for s in spans if s.parent_id == last.address.span_id]
        (sample, *_) = [s for s in resumed if s.name == "sample"]
        assert sample.attributes["first_token"] == last.attributes["stored_tokens"]


def test_an_expired_lease_and_a_failed_episode_are_seen(redis_url, keys):
    async def story(ring, recorded):
        lease = operations.lease("gone", ttl_ms=50, n=GROUP, version=FIRST)
        assert (await ring.store.run(lease)).status == "OK"
        actor = Actor(ring, "a", run={"max_prompt_tokens": 2})
        await until(lambda: len(recorded.named("fail")) >= GROUP)
        await stop(actor)

    recorded = traced(redis_url, keys, story, lease_timeout_s=0.5, reap_every_s=0.1)

    assert {span.attributes["task"] for span in recorded.named("expire")} == set(range(GROUP))
    failed = recorded.named("fail")
    assert all(span.is_error and span.attributes["kind"] == "data" for span in failed)
