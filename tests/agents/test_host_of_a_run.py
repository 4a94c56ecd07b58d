"""`python -m agents` beside a real broker and store: an agent asks, is answered, and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agents.__main__ import main
from broker.protocol.agent_calls import AgentAnswer, decode_call, encode_reply
from broker.transport.keys import make_keys
from tests.broker.support.ring import begin
from tests.broker.support.talks import ActorSide, agent_ring, host_program

AGENT = """
import json, openai, os
client = openai.OpenAI()
said = []
for turn in range(3):
    messages = [{"role": "user", "content": f"{os.environ['NYALA_TASK']} {turn}"}]
    answer = client.chat.completions.create(model="m", messages=messages)
    said.append(answer.choices[0].message.content)
assert said == ["re 1", "re 2", "re 3"], said
raise SystemExit("it went well")
"""


async def answer_three(actor: ActorSide) -> None:
    number = 0
    while number < 3:
        calls = await actor.listen()
        for call in calls.calls if calls is not None else ():
            number += 1
            if call.parent == 0:
                assert decode_call(call.tail).route == "chat"
            await actor.say(number, encode_reply(AgentAnswer("stop", 4, 3, text=f"re {number}")))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


@pytest.mark.slow
def test_an_agent_of_a_run_talks_through_the_broker(redis_url, keys, tmp_path):
    async def story():
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            async with host_program(here, tmp_path, AGENT) as host:
                actor = await ActorSide.begin(await here.actor(), payload=b'"2+3?"')
                async with asyncio.timeout(60):
                    await answer_three(actor)
                    ended = None
                    while ended is None or not ended.why:
                        ended = await actor.listen()
                host.terminate()
                async with asyncio.timeout(30):
                    code = await host.wait()

            assert code == 0
            assert ended.why == "died"
            assert ended.text == "exit code 1; its last output:\nit went well\n"
            assert actor.length == 9

    asyncio.run(story())


def test_a_run_without_agents_is_refused(tmp_path, capfd):
    (tmp_path / "config.yaml").write_text('{"run": {"model": "init"}}')

    assert main(["--config", str(tmp_path / "config.yaml")]) == 2
    assert "run.environment must be agent for `nyala agents`" in capfd.readouterr().err
