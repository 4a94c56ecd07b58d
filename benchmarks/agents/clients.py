"""Agents of the benchmark: they send a long history, and more of it with every turn."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx

from benchmarks.support.progress import Say

BODY_BYTES = 40_000
RESULT_BYTES = 300
"""Of a tool, between two turns."""
SETTLE_S = 4.0
"""After a change of the wait, until as many conversations wait as will."""
WORDS = tuple(
    f"{first}{last}"
    for first in ("re", "con", "data", "table", "index", "read", "file", "line")
    for last in ("s", "ing", "ed", "er", "able", "tion", " of", ".py", "_id", ":")
)
TOKENS = range(264, 328)
"""Of the vocabulary that is made of these words, behind single bytes and special tokens."""


class Window(NamedTuple):
    """What all conversations did in one window."""

    tokens_per_s: float
    turn_ms: float


class ChatClient:
    """The loop of an agent that sends messages.

    Args:
        line: Line of the host about its conversation.
        http: Client with a connection of its own.
        body_bytes: Length of its first message.
    """

    def __init__(
        self, line: dict[str, Any], http: httpx.AsyncClient, *, body_bytes: int = BODY_BYTES
    ) -> None:
        self._http, self._url = http, f"{line['url']}/chat/completions"
        self._headers = {"Authorization": f"Bearer {line['key']}"}
        self._chance = random.Random(line["url"].rpartition("conversations")[2])
        self._messages = [{"role": "user", "content": self._text(body_bytes)}]

    def body(self) -> bytes:
        """Return the body of the next turn."""
        return json.dumps({"model": "nyala", "messages": self._messages}).encode()

    async def take_turn(self, body: bytes) -> int:
        """Ask, take the answer and the result of a tool into the history; return its tokens."""
        answer = await self._http.post(self._url, content=body, headers=self._headers)
        answer.raise_for_status()
        fields = answer.json()
        said = {"role": "assistant", "content": fields["choices"][0]["message"]["content"]}
        self._messages += [said, {"role": "tool", "content": self._text(RESULT_BYTES)}]
        tokens: int = fields["usage"]["completion_tokens"]
        return tokens

    def _text(self, length: int) -> str:
        return " ".join(self._chance.choices(WORDS, k=length // 4))[:length]


class TokenClient:
    """The loop of an agent that sends tokens, which the actor neither renders nor parses."""

    def __init__(self, line: dict[str, Any], http: httpx.AsyncClient) -> None:
        self._http = http
        self._url = f"{line['url'].removesuffix('/v1')}/inference/v1/generate"
        self._headers = {"Authorization": f"Bearer {line['key']}"}
        self._ids = [*TOKENS] * 2

    def body(self) -> bytes:
        """Return the body of the next turn."""
        return json.dumps({"token_ids": self._ids}).encode()

    async def take_turn(self, body: bytes) -> int:
        """Ask, and take the answer and tokens of a tool into the history; return its tokens."""
        answer = await self._http.post(self._url, content=body, headers=self._headers)
        answer.raise_for_status()
        said = answer.json()["choices"][0]["token_ids"]
        self._ids += [*said, *TOKENS]
        return len(said)


async def take_many(
    lines: Sequence[dict[str, Any]], waits: Sequence[float], window_s: float, *, say: Say
) -> list[Window]:
    """Hold all conversations at once; return a window for each wait between two turns."""
    wait_s, tokens = 0.0, 0
    times_ms: list[float] = []
    context = ssl.create_default_context()  # one for all: each takes 20 ms
    begun = asyncio.Barrier(len(lines) + 1)

    async def converse(line: dict[str, Any]) -> None:
        nonlocal tokens
        async with httpx.AsyncClient(timeout=600, verify=context) as http:
            agent = ChatClient(line, http)
            await agent.take_turn(agent.body())  # the actor renders each history once
            await begun.wait()
            while True:
                began = time.monotonic()
                made = await agent.take_turn(agent.body())
                tokens += made
                times_ms.append(1e3 * (time.monotonic() - began))
                await asyncio.sleep(wait_s)

    windows: list[Window] = []
    async with asyncio.TaskGroup() as group:
        talking = [group.create_task(converse(line)) for line in lines]
        await begun.wait()
        for wait_s in waits:
            await asyncio.sleep(SETTLE_S)
            times_ms.clear()
            before, began = tokens, time.monotonic()
            await asyncio.sleep(window_s)
            rate = (tokens - before) / (time.monotonic() - began)
            windows.append(Window(rate, sorted(times_ms)[len(times_ms) // 2]))
            say(f"waits of {wait_s:g} s: {rate:.0f} tokens/s, {windows[-1].turn_ms:.0f} ms a turn")
        wait_s = 3600.0
        await asyncio.sleep(SETTLE_S)
        for task in talking:
            task.cancel()
    return windows


async def take_turns(
    line: dict[str, Any], bare_url: str, turns: int, client: Callable[..., ChatClient | TokenClient]
) -> tuple[list[float], list[float]]:
    """Hold one conversation; return the times of its turns and of a bare endpoint's, ms."""
    door_ms: list[float] = []
    bare_ms: list[float] = []
    async with httpx.AsyncClient(timeout=600) as http:
        agent = client(line, http)
        for _ in range(turns):
            body = agent.body()
            began = time.perf_counter()
            answer = await http.post(bare_url, content=body)
            answer.raise_for_status()
            answer.json()
            bare_ms.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            await agent.take_turn(body)
            door_ms.append(1e3 * (time.perf_counter() - began))
        url, key = line["url"].removesuffix("/v1"), line["key"]
        end = {"reward": 1.0, "done": True}
        await http.post(f"{url}/reward", json=end, headers={"x-api-key": key})
    return door_ms[1:], bare_ms[1:]  # the first turn renders the whole history
