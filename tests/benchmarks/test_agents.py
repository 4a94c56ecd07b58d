"""The arithmetic of `python -m benchmarks.agents`, its agents and its engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from actors.engine.engine import GenerationRequest
from benchmarks.agents.__main__ import ratios
from benchmarks.agents.clients import RESULT_BYTES, ChatClient, TokenClient
from benchmarks.agents.simulated_actor import INSTANT_TOKENS, SLOTS, SimulatedEngine

LINE = {"url": "http://door/conversations/1-2/v1", "key": "k"}


def request(number: int) -> GenerationRequest:
    return GenerationRequest(str(number), (1, 2), 1000, 1.0, stop_token_ids=(7,), stream=(0, 0))


def test_waiting_is_compared_with_busy_and_the_bare_endpoint_with_the_door():
    arms: dict[str, dict[str, Any]] = {
        "busy": {"tokens_per_s": 3200.0},
        "waiting": {"tokens_per_s": 3040.0},
        "chat": {"turn_ms": 6.0, "bare_ms": 1.5},
    }

    assert ratios(arms) == {"bare_over_chat": 0.25, "waiting_over_busy": 0.95}
    assert ratios({}) == {}


def test_an_agent_sends_its_whole_history_with_each_turn():
    bodies: list[Any] = []

    def answer(asked: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(asked.content))
        said = {"message": {"content": "said"}, "token_ids": [9, 9]}
        return httpx.Response(200, json={"choices": [said], "usage": {"completion_tokens": 5}})

    async def story() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            agent, by_tokens = ChatClient(LINE, http, body_bytes=40_000), TokenClient(LINE, http)
            assert [await agent.take_turn(agent.body()) for _ in range(2)] == [5, 5]
            assert [await by_tokens.take_turn(by_tokens.body()) for _ in range(2)] == [2, 2]

    asyncio.run(story())

    first, second, ids, more_ids = bodies
    assert len(first["messages"][0]["content"]) > 0.9 * 40_000
    assert second["messages"][:2] == [*first["messages"], {"role": "assistant", "content": "said"}]
    assert len(second["messages"][2]["content"]) > 0.9 * RESULT_BYTES
    assert more_ids["token_ids"][: len(ids["token_ids"]) + 2] == [*ids["token_ids"], 9, 9]


def test_an_engine_without_steps_answers_at_once_and_ends_with_a_stop_token():
    async def story() -> None:
        engine = SimulatedEngine(0.0)
        engine.submit([request(number) for number in range(3)])
        deltas = await engine.deltas()

        assert [delta.request_id for delta in deltas] == ["0", "1", "2"]
        assert all(len(d.token_ids) == INSTANT_TOKENS for d in deltas)
        assert {d.token_ids[-1] for d in deltas} == {7}
        assert {d.finish_reason for d in deltas} == {"stop"}

    asyncio.run(story())


def test_an_engine_has_no_more_turns_at_a_time_than_places():
    async def story() -> None:
        engine = SimulatedEngine(0.001)
        engine.submit([request(number) for number in range(SLOTS + 2)])
        ended: list[str] = []
        late = {str(SLOTS), str(SLOTS + 1)}
        while len(ended) < SLOTS + 2:
            deltas = await engine.deltas()
            before = len(ended)
            ended += [d.request_id for d in deltas if d.finish_reason]
            assert before or late.isdisjoint(d.request_id for d in deltas if not d.finish_reason)

        assert len(set(ended)) == SLOTS + 2
        assert late.isdisjoint(ended[:1])

    asyncio.run(asyncio.wait_for(story(), 30))
