"""Stock clients as live agents of a real host: door, broker, store and the actor's loop.

Run beside CI, `pytest tests/system/agent_clients.py`. The engine is scripted: it writes, token by
token, the calls that each client's tools take. A model that is small enough for a test could not
read prompts of thousands of tokens, and no rule of the door depends on what is said.
"""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engine.tokenizer import ModelTokenizer
from actors.environments.agent import Agent
from actors.environments.calls import EnvironmentSource
from broker.transport.keys import make_keys
from buffer import operations
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode
from tests.actors.support.fake_actor import Actor
from tests.actors.support.fake_engine import FakeEngine
from tests.actors.support.saved_tokenizer import SPECIAL, save_tokenizer
from tests.broker.support.ring import GROUP, begin, until_stats
from tests.broker.support.talks import agent_ring, host_program
from tests.system.support.client_programs import (
    CLIENTS,
    IN_PLACE_OF_A_TURN,
    POST,
    TASK,
    VERSIONS,
    StockClient,
)
from tests.waiting import until

LONGEST_S = 600.0  # uv installs half a gigabyte the first time
pytestmark = [pytest.mark.live, pytest.mark.timeout(2 * LONGEST_S)]

POINTER = {"digest": "d", "endpoint": "tcp://127.0.0.1:1", "public_key": "k" * 40}
BEGIN, END = "<|im_start|>assistant\n", "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = [*string.printable, "?", *SPECIAL]
IDS = {token: number for number, token in enumerate(TOKENS)}
SIZES = {"max_prompt_tokens": 40_000, "max_completion_tokens": 120_000}
"""One token is one character here; smolagents' first prompt has some ten thousand."""


def says(turns: tuple[str, ...]) -> Callable[[tuple[int, ...]], int]:
    """A policy that says one turn after another, by the number of turns in its context."""

    def policy(context: tuple[int, ...]) -> int:
        text = "".join(map(TOKENS.__getitem__, context))
        before, _, said = text.rpartition(BEGIN)
        turn = turns[before.count(BEGIN) + before.count(IN_PLACE_OF_A_TURN)]
        return IDS[turn[len(said)] if len(said) < len(turn) else END]

    return policy


def said_in(episode: Episode) -> list[str]:
    """The sampled turns of an episode, in the order of its log."""
    completion = episode.completion
    sampled = completion.token_ids[completion.loss_mask.astype(bool)]
    text = "".join(map(TOKENS.__getitem__, sampled.tolist()))
    assert text.endswith(END)
    return text.split(END)[:-1]


async def episodes_of(redis_url: str, folder: Path, client: StockClient) -> list[Episode]:
    """What two conversations of a client leave in the store."""
    (folder / "tasks.jsonl").write_text(f"{json.dumps({'task': TASK})}\n" * 40)
    model = save_tokenizer(folder / "model", template=TEMPLATE, letters=string.printable)
    tokenizer = ModelTokenizer(model)
    environment = Agent(path=str(folder / "tasks.jsonl"), prompt="task")
    keys, sizes = make_keys(folder / "keys"), {"max_episode_bytes": 2**21}
    async with agent_ring(redis_url, keys, max_message_bytes=2**22, **sizes, **SIZES) as ring:
        await begin(ring.store, groups=1)
        await ring.store.run(operations.publish(1, 0, POINTER))
        await until(lambda: ring.parts.cache.publication)
        actor = Actor(
            ring,
            "actor-1",
            engine=FakeEngine(says(client.turns), tokens_per_step=16),
            tokenizer=tokenizer,
            environments=[EnvironmentSource(lambda: environment, is_shared=True)],
            run=SIZES,
        )
        (folder / "nyala_task.py").write_text(POST)
        own_python = {"command": "python agent.py", "requirements": VERSIONS}
        async with host_program(ring, folder, client.program, **own_python) as host:
            await until_stats(
                ring, lambda stats: stats.buffered + stats.dead == GROUP, timeout_s=LONGEST_S
            )
            actor.loop.stop()
            await actor.end()
            host.terminate()
            assert await host.wait() == 0
        records = await ring.store.run(operations.records(list(range(GROUP))))
        return [decode_episode(record) for record in records if record is not None]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_stock_client_talks_for_several_turns_with_tools_and_posts_a_reward(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    client = CLIENTS[name]

    episodes = asyncio.run(episodes_of(redis_url, tmp_path, client))

    assert len(episodes) == GROUP
    for episode in episodes:
        assert (episode.reward, episode.finish_reason) == (1.0, "stop")
        assert said_in(episode) == list(client.turns)
        assert bool(episode.completion.branches) is client.rewrites_history
