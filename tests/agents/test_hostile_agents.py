"""What a hostile agent sends costs the door a bounded amount, and others nothing."""

from __future__ import annotations

import asyncio
import json
import resource

import httpx

from agents import door
from broker.protocol.agent_calls import MAX_BODY_BYTES, AgentAnswer
from tests.agents.support.opened_door import opened
from tests.waiting import until

ASK = {"messages": [{"role": "user", "content": "2+3?"}]}


def keyed(conversation):
    return {"x-api-key": conversation.key}


async def status_of(reader) -> int:
    """Read the status line of an answer; 0 = the connection was cut without one."""
    try:
        line = await reader.readline()
    except ConnectionError:
        return 0
    return int(line.split()[1]) if line else 0


def head(here, conversation, key, *lines) -> bytes:
    path = f"/conversations/{conversation.name}/v1/chat/completions"
    fields = [f"POST {path} HTTP/1.1", "Host: h", f"X-Api-Key: {key}", *lines, "", ""]
    return "\r\n".join(fields).encode()


def test_a_gigabyte_without_a_key_is_not_read():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(head(here, conversation, "wrong", "Content-Length: 1000000000"))
            sent = 0
            try:
                while sent < 10**9:
                    writer.write(bytes(2**20))
                    sent += 2**20
                    await writer.drain()
            except ConnectionError:
                pass
            status = await status_of(reader)
            writer.close()

            assert sent < 50 * 2**20
            assert status in {0, 401}  # the kernel may cut the connection before it is read

    asyncio.run(story())


def test_a_key_opens_its_own_conversation_while_that_goes_on():
    async def story():
        async with opened() as here:
            mine, other = here.conversation(1), here.conversation(2)
            url = f"{here.url(mine)}/v1/chat/completions"
            async with httpx.AsyncClient() as client:

                async def ask(headers, to=url):
                    return (await client.post(to, json=ASK, headers=headers)).status_code

                bearer = {"Authorization": f"Bearer {mine.key}"}
                assert [await ask(keyed(mine)), await ask(bearer)] == [200, 200]
                assert [await ask(keyed(other)), await ask({})] == [401, 401]
                assert await ask(keyed(mine), url.replace(mine.name, "3-3")) == 401
                assert await ask(keyed(mine), url.replace("/v1/", "/v2/")) == 404
                done = {"done": True}
                await client.post(f"{here.url(mine)}/reward", json=done, headers=keyed(mine))
                assert await ask(keyed(mine)) == 401
                assert len(here.mailbox.boxes[2].lines) == 0

    asyncio.run(story())


def test_bodies_are_bounded_with_and_without_a_length():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            url = f"{here.url(conversation)}/v1/chat/completions"

            sent = 0

            async def parts():
                nonlocal sent
                while sent < 10 * MAX_BODY_BYTES:
                    sent += 2**16
                    yield b" " * 2**16

            async with httpx.AsyncClient() as client:
                fits = json.dumps(ASK).encode().ljust(MAX_BODY_BYTES)
                answers = [
                    await client.post(url, content=fits, headers=keyed(conversation)),
                    await client.post(url, content=fits + b" ", headers=keyed(conversation)),
                ]
                assert [answer.status_code for answer in answers] == [200, 413]
                try:
                    answer = await client.post(url, content=parts(), headers=keyed(conversation))
                    assert answer.status_code == 413
                except httpx.TransportError:  # cut while it was still sending
                    pass
            assert sent < 5 * MAX_BODY_BYTES
            assert len(here.mailbox.boxes[1].lines) == 1

    asyncio.run(story())


def test_slow_bodies_and_slow_headers_end_at_their_deadlines(monkeypatch):
    monkeypatch.setattr(door, "HEADERS_S", 0.3)

    async def story():
        async with opened(body_s=0.3) as here:
            conversation = here.conversation()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(head(here, conversation, conversation.key, "Content-Length: 100") + b"{")
            idle, idle_writer = await asyncio.open_connection("127.0.0.1", here.port)
            idle_writer.write(b"POST /conversations/1")

            async with asyncio.timeout(10):
                assert await status_of(reader) == 408
                assert await idle.read() == b""
            writer.close()
            idle_writer.close()

    asyncio.run(story())


def test_huge_headers_are_refused():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            huge = "X-Huge: " + "x" * 2**20
            writer.write(head(here, conversation, conversation.key, huge, "Content-Length: 0"))
            async with asyncio.timeout(10):
                assert await status_of(reader) in {0, 400}
            writer.close()

    asyncio.run(story())


def test_connections_are_bounded():
    async def story():
        async with opened() as here:
            most = 4 * door.CONNECTIONS_PER_CONVERSATION
            pairs = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(most + 8)]
            cut = 0
            for reader, _ in pairs[most:]:
                async with asyncio.timeout(10):
                    cut += await reader.read() == b""
            for _, writer in pairs:
                writer.close()

            assert cut == 8

    asyncio.run(story())


def test_open_calls_are_bounded_and_the_rest_told_when_to_come_again():
    released = asyncio.Event()

    async def model(_call, number):
        await released.wait()
        return AgentAnswer("stop", 5, 2, text=f"late {number}")

    async def story():
        async with opened(model) as here:
            conversation = here.conversation()
            url = f"{here.url(conversation)}/v1/chat/completions"
            async with httpx.AsyncClient(timeout=30, headers=keyed(conversation)) as client:
                asking = [asyncio.create_task(client.post(url, json=ASK)) for _ in range(32)]
                await until(lambda: conversation.num_open == 32)
                refused = await client.post(url, json=ASK)
                released.set()
                answers = [(await one).status_code for one in asking]

            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["error"]["code"] == "too_many_open_calls"
            assert answers == [200] * 32

    asyncio.run(story())


def test_calls_are_cut_at_the_most_and_their_memory_is_bounded(monkeypatch):
    """The bound itself is lowered: a request takes a millisecond or two."""
    monkeypatch.setattr("agents.conversation.MAX_CALLS", 100)

    async def story():
        async with opened() as here:
            conversation = here.conversation()
            url = f"{here.url(conversation)}/v1/chat/completions"
            long = "x" * 200_000
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            statuses = []
            async with httpx.AsyncClient(headers=keyed(conversation)) as client:
                for number in range(110):
                    body = {"messages": [{"role": "user", "content": f"{long}{number}"}]}
                    statuses.append((await client.post(url, json=body)).status_code)
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            here.mailbox.boxes[1].bodies.clear()

            assert statuses == [200] * 100 + [400] * 10
            stored = sum(len(tail) for _, _, tail in here.mailbox.boxes[1].lines)
            assert stored < 2 * len(long)
            assert len(conversation.open_calls) <= 33
            assert grown_kib < 50_000  # the twin keeps 20 MB of whole bodies

    asyncio.run(story())


def test_malformed_bodies_are_told_what_is_wrong():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            url = f"{here.url(conversation)}/v1/chat/completions"
            async with httpx.AsyncClient(headers=keyed(conversation)) as client:
                for body in (
                    b"",
                    b"[]",
                    b"{",
                    b'{"messages": 1}',
                    b'{"messages":[' * 10**5,
                    b"\xff",
                ):
                    answer = await client.post(url, content=body)
                    assert answer.status_code == 400, body[:20]
                    assert answer.json()["error"]["type"] == "invalid_request_error"
            assert here.mailbox.boxes[1].lines == []

    asyncio.run(story())
