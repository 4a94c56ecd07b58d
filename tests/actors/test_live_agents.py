"""Live agents against the actor's real loop, a real broker and a real Redis; the model is fake."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from actors.engine.tokenizer import ModelTokenizer
from actors.environments.agent import Agent
from actors.environments.calls import EnvironmentSource
from actors.episodes.rollout import Transcript
from actors.loop import AWAY_PER_SLOT
from broker.client import BrokerClient
from broker.protocol.agent_calls import (
    AgentAnswer,
    AgentCall,
    AgentReply,
    decode_reply,
    encode_call,
    ids_of,
)
from broker.protocol.conversation_messages import CallsReply, ListenRequest
from broker.protocol.messages import Verdict
from broker.transport.keys import make_keys
from buffer import operations
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode
from tests.actors.support.fake_actor import Actor, KilledLoop
from tests.actors.support.fake_engine import FakeEngine, hang_after, logprob_of
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer
from tests.broker.support.ring import FIRST, GROUP, Ring, begin, until_stats
from tests.broker.support.talks import HostSide, agent_ring, host_of, host_program
from tests.waiting import until

POINTER = {"digest": "d", "endpoint": "tcp://127.0.0.1:1", "public_key": "k" * 40}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("run") / "keys")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer(save_tokenizer(tmp_path_factory.mktemp("chat"), template=CHATML))


@pytest.fixture
def rows(tmp_path: Path) -> EnvironmentSource:
    path = tmp_path / "tasks.jsonl"
    tasks = [{"task": f"task {number}"} for number in range(40)]
    path.write_text("\n".join(map(json.dumps, tasks)))
    environment = Agent(path=str(path), prompt="task")
    return EnvironmentSource(lambda: environment, is_shared=True)


def in_ring(
    redis_url: str,
    keys: Path,
    story: Callable[[Ring], Coroutine[Any, Any, None]],
    *,
    groups: int = 1,
    **broker: Any,
) -> None:
    async def tell() -> None:
        async with agent_ring(redis_url, keys, **broker) as running:
            await begin(running.store, groups=groups)
            await running.store.run(operations.publish(1, 0, POINTER))
            await until(lambda: running.parts.cache.publication)
            await story(running)

    asyncio.run(asyncio.wait_for(tell(), 60))


def speaks(end: int) -> Callable[[tuple[int, ...]], int]:
    """A policy whose next token is a function of the context."""

    def policy(context: tuple[int, ...]) -> int:
        drawn = zlib.crc32(repr(context).encode())
        return end if drawn % 20 == 0 else drawn % 26

    return policy


def live_actor(
    ring: Ring, name: str, tokenizer: ModelTokenizer, rows: EnvironmentSource, **more: Any
) -> Actor:
    engine = FakeEngine(speaks(tokenizer.stop_token_ids[0]), tokens_per_step=2)
    run = {"max_completion_tokens": 900, "max_prompt_tokens": 200, **more.pop("run", {})}
    return Actor(
        ring, name, engine=engine, tokenizer=tokenizer, environments=[rows], run=run, **more
    )


class LiveAgent:
    """An agent's loop: questions, answers of the policy, and what it heard."""

    def __init__(self, host: HostSide) -> None:
        self.host = host
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "go on"}]
        self.heard: list[AgentReply] = []

    async def ask(self) -> AgentAnswer:
        fields = {"return_token_ids": True, "messages": self.messages}
        stored = await self.host.ask(encode_call(AgentCall("chat", json.dumps(fields).encode())))
        reply = decode_reply(stored.reply)
        self.heard.append(reply)
        assert isinstance(reply, AgentAnswer), reply
        said = {"role": "assistant", "content": reply.text}
        self.messages += [said, {"role": "tool", "content": f"result {len(self.heard)}"}]
        return reply


async def play(ring: Ring, number: int, *, turns: int, reward: float | None = 1.0) -> LiveAgent:
    agent = LiveAgent(await HostSide.begin(host_of(ring, f"host-{number}")))
    for _ in range(turns):
        await agent.ask()
    assert await agent.host.end(reward=reward) is Verdict.OK
    return agent


async def episodes(ring: Ring, count: int) -> list[Episode]:
    records = await ring.store.run(operations.records(list(range(count))))
    return [decode_episode(record) for record in records if record is not None]


def check_episode(episode: Episode, agent: LiveAgent, policy: Callable[..., int]) -> None:
    """Check that it has what its agent heard, as an actor that is never killed would say it."""
    completion = episode.completion
    log, prompt = Transcript.from_completion(completion), tuple(episode.prompt_ids.tolist())
    assert not completion.branches
    tokens, mask = prompt + log.tokens(), completion.loss_mask.tolist()
    for place, is_sampled in enumerate(mask, start=len(prompt)):
        if is_sampled:
            assert tokens[place] == policy(tokens[:place])
            at = place - len(prompt)
            assert completion.behaviour_logprobs[at] == pytest.approx(
                logprob_of(tokens[: place + 1])
            )
    answers = [reply for reply in agent.heard if isinstance(reply, AgentAnswer)]
    assert sum(mask) == sum(reply.num_completion_tokens for reply in answers)
    last = answers[-1]
    assert tokens == (*ids_of(last.prompt_ids), *ids_of(last.completion_ids))


def by_task(agents: list[LiveAgent]) -> dict[int, LiveAgent]:
    return {agent.host.ticket.task_id: agent for agent in agents}


def test_agents_call_are_answered_and_post_a_reward(
    redis_url: str, keys: Path, tokenizer: ModelTokenizer, rows: EnvironmentSource
) -> None:
    async def story(ring: Ring) -> None:
        actor = live_actor(ring, "actor-1", tokenizer, rows)
        agents = await asyncio.gather(*(play(ring, n, turns=3, reward=0.5) for n in range(GROUP)))
        await until_stats(ring, lambda stats: stats.buffered == GROUP)
        actor.loop.stop()
        await actor.end()

        for agent in agents:
            assert json.loads(agent.host.ticket.payload)["task"].startswith("task ")
        for episode in await episodes(ring, GROUP):
            assert (episode.reward, episode.finish_reason) == (0.5, "stop")
            assert episode.environment_metrics["num_turns"] == 3
            check_episode(episode, by_task(agents)[episode.task_id], actor.engine.policy)

    in_ring(redis_url, keys, story)


class CountingClient:
    """A client of the broker that counts long polls for calls."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self.num_listens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def listen(self, request: ListenRequest, *, deadline_s: float) -> CallsReply:
        self.num_listens += 1
        return await self._client.listen(request, deadline_s=deadline_s)


def test_tokens_and_replies_end_no_long_poll(
    redis_url: str, keys: Path, tokenizer: ModelTokenizer, rows: EnvironmentSource
) -> None:
    async def story(ring: Ring) -> None:
        actor = live_actor(ring, "actor-1", tokenizer, rows, wrap=CountingClient)
        await until(lambda: actor.client.num_listens and len(actor.loop._leases) == GROUP)
        before = actor.client.num_listens
        agent = await play(ring, 0, turns=3)

        assert sum(x.num_completion_tokens for x in agent.heard if isinstance(x, AgentAnswer)) > 12
        assert actor.client.num_listens <= before + 1 + 3 + 1  # a lease, calls, the end
        actor.loop.stop()
        await actor.end()

    in_ring(redis_url, keys, story, long_poll_s=30.0)


@pytest.mark.parametrize("steps", [2, 7, 12, 19])
def test_a_killed_actors_conversation_goes_on_at_another_actor(
    redis_url: str, keys: Path, tokenizer: ModelTokenizer, rows: EnvironmentSource, steps: int
) -> None:
    async def story(ring: Ring) -> None:
        first = live_actor(ring, "first", tokenizer, rows, kind=KilledLoop)
        hang_after(first.engine, steps)
        playing = [asyncio.create_task(play(ring, n, turns=4)) for n in range(GROUP)]
        await until(lambda: first.loop.sampling.num_tokens >= 2 * steps)
        await asyncio.sleep(0.3)  # several snapshots
        first.life.cancel()
        await asyncio.gather(first.life, return_exceptions=True)
        second = live_actor(ring, "second", tokenizer, rows)
        agents = await asyncio.gather(*playing)
        await until_stats(ring, lambda stats: stats.buffered == GROUP)
        second.loop.stop()
        await second.end()

        made = await episodes(ring, GROUP)
        assert {run.incarnation for x in made for run in x.completion.fences} == {"first", "second"}
        for episode in made:
            check_episode(episode, by_task(agents)[episode.task_id], second.engine.policy)

    in_ring(redis_url, keys, story, lease_timeout_s=2.0, reap_every_s=0.1)


def test_conversations_that_wait_hold_no_place_and_are_released_by_a_drain(
    redis_url: str, keys: Path, tokenizer: ModelTokenizer, rows: EnvironmentSource
) -> None:
    async def story(ring: Ring) -> None:
        actor = live_actor(ring, "first", tokenizer, rows, max_concurrent_episodes=2)
        leases = actor.loop._leases

        def away() -> int:
            return leases.num_with_agents

        await until(lambda: away() == 6)
        agent = await play(ring, 0, turns=2)
        await until_stats(ring, lambda stats: stats.buffered == 1)
        assert leases.num_active == 0
        actor.loop.stop()
        await actor.end()
        await until_stats(ring, lambda stats: stats.leased == 0)

        second = live_actor(ring, "second", tokenizer, rows)
        await play(ring, 1, turns=1)
        await until_stats(ring, lambda stats: stats.buffered == 2)
        second.loop.stop()
        await second.end()
        assert agent.heard

    in_ring(redis_url, keys, story, groups=3)


def test_a_full_actor_takes_over_agents_whose_actor_died_and_nothing_new(
    redis_url: str, keys: Path, tokenizer: ModelTokenizer, rows: EnvironmentSource
) -> None:
    """Its own leases would wait for places at hosts that those agents have, and they for it."""

    async def story(ring: Ring) -> None:
        lease = operations.lease("thief", ttl_ms=60_000, n=GROUP, version=FIRST)
        theirs = [(task.task_id, task.fence) for task in (await ring.store.run(lease)).tasks]
        await ring.store.run(operations.want_agents([(*place, b"{}") for place in theirs]))
        hosts = [await HostSide.begin(host_of(ring, f"host-{n}")) for n in range(GROUP)]
        actor = live_actor(ring, "second", tokenizer, rows, max_concurrent_episodes=GROUP)
        leases, most = actor.loop._leases, AWAY_PER_SLOT * GROUP
        await until(lambda: leases.num_wanted >= most and not leases.num_active)
        await asyncio.sleep(0.3)  # a request under way when it was not full may bring more
        before, new = len(leases), (await ring.store.run(operations.stats())).new_units
        assert new > 0
        await ring.store.run(operations.release(theirs))
        agents = [LiveAgent(host) for host in hosts]
        await asyncio.gather(*(agent.ask() for agent in agents))

        assert len(leases) == before + GROUP
        assert (await ring.store.run(operations.stats())).new_units == new
        for agent in agents:
            await agent.host.end()
        await until_stats(ring, lambda stats: stats.buffered == GROUP)
        actor.loop.stop()
        await actor.end()

    in_ring(redis_url, keys, story, groups=AWAY_PER_SLOT + 4)


@pytest.mark.parametrize("why", ["died", "timeout", "host"])
def test_an_agent_that_fails_is_no_reward_of_zero_and_its_task_begins_anew(
    redis_url: str,
    keys: Path,
    tokenizer: ModelTokenizer,
    rows: EnvironmentSource,
    why: str,
) -> None:
    async def story(ring: Ring) -> None:
        actor = live_actor(ring, "actor-1", tokenizer, rows)
        failed = LiveAgent(await HostSide.begin(host_of(ring, "host-0")))
        await failed.ask()
        assert await failed.host.end(None, why=why, text="the last words") is Verdict.OK
        task = failed.host.ticket.task_id
        agents = await asyncio.gather(*(play(ring, n, turns=2) for n in range(1, GROUP + 1)))
        await until_stats(ring, lambda stats: stats.buffered == GROUP)
        actor.loop.stop()
        await actor.end()

        stats = await ring.store.run(operations.stats())
        assert (stats.data_failures, stats.dead) == (int(why != "host"), 0)
        assert by_task(agents)[task].host.ticket.ticket != failed.host.ticket.ticket
        for episode in await episodes(ring, GROUP):
            assert episode.reward == 1.0
            check_episode(episode, by_task(agents)[episode.task_id], actor.engine.policy)

    in_ring(redis_url, keys, story)


def test_reward_functions_judge_what_was_said_where_no_reward_is_posted(
    redis_url: str,
    keys: Path,
    tokenizer: ModelTokenizer,
    rows: EnvironmentSource,
    tmp_path: Path,
) -> None:
    code = (
        "def length(*, completion, task):\n"
        "    assert task.startswith('task ')\n"
        "    return float(len(completion))\n"
    )
    (tmp_path / "mine.py").write_text(code)

    async def story(ring: Ring) -> None:
        reward = f"{tmp_path}/mine.py:length"
        actor = live_actor(ring, "actor-1", tokenizer, rows, reward=reward)
        playing = (play(ring, n, turns=2, reward=posted) for n, posted in enumerate((None, 0.25)))
        agents = await asyncio.gather(*playing)
        await until_stats(ring, lambda stats: stats.buffered == GROUP)
        actor.loop.stop()
        await actor.end()

        for episode in await episodes(ring, GROUP):
            agent = by_task(agents)[episode.task_id]
            assert isinstance(agent.heard[-1], AgentAnswer)
            assert episode.reward == len(agent.heard[-1].text)
            posted = 0.0 if agent is agents[0] else 0.25
            assert episode.reward_parts["environment"] == posted

    in_ring(redis_url, keys, story)


PROGRAM = """
import json, openai, os, urllib.request
client = openai.OpenAI()
messages = [{"role": "user", "content": json.loads(os.environ["NYALA_TASK"])["task"]}]
for turn in range(4):
    answer = client.chat.completions.create(model="m", messages=messages)
    said = answer.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward",
    json.dumps({"reward": 0.75}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
urllib.request.urlopen(request)
"""


@pytest.mark.slow
def test_a_program_with_openais_client_outlives_the_actor_that_answers_it(
    redis_url: str, tokenizer: ModelTokenizer, rows: EnvironmentSource, tmp_path: Path
) -> None:
    keys = make_keys(tmp_path / "keys")

    async def story(ring: Ring) -> None:
        async with host_program(ring, tmp_path, PROGRAM) as host:
            first = live_actor(ring, "first", tokenizer, rows, kind=KilledLoop)
            hang_after(first.engine, 9)
            await until(lambda: first.loop.sampling.num_tokens >= 9, timeout_s=40.0)
            await asyncio.sleep(0.3)  # several snapshots
            first.life.cancel()
            await asyncio.gather(first.life, return_exceptions=True)
            second = live_actor(ring, "second", tokenizer, rows)
            await until_stats(ring, lambda stats: stats.buffered == GROUP)
            second.loop.stop()
            await second.end()
            host.terminate()
            async with asyncio.timeout(30):
                await host.wait()

        made = await episodes(ring, GROUP)
        assert {run.incarnation for x in made for run in x.completion.fences} == {"first", "second"}
        for episode in made:
            assert episode.reward == 0.75
            assert episode.environment_metrics["num_turns"] == 4
            assert not episode.completion.branches

    in_ring(redis_url, keys, story, lease_timeout_s=2.0, reap_every_s=0.1)
