"""What a hostile agent sends costs the door a bounded amount, and others nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from agents import conversation, door
from agents.conversation import AgentEnd
from broker.protocol.agent_calls import MAX_BODY_BYTES, AgentAnswer, decode_call
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


def head(conversation, key, *lines, method="POST", path="/v1/chat/completions") -> bytes:
    line = f"{method} /conversations/{conversation.name}{path} HTTP/1.1"
    return "\r\n".join([line, "Host: h", f"X-Api-Key: {key}", *lines, "", ""]).encode()


async def exchange(here, sent: bytes) -> bytes:
    """Send bytes, and read until the door ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(sent)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


def test_a_gigabyte_without_a_key_is_not_read():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(head(conversation, "wrong", "Content-Length: 1000000000"))
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
                assert [await ask(keyed(mine)), await ask(keyed(other))] == [410, 401]
                here.conversations.end(mine)
                assert [await ask(keyed(mine)), await ask(keyed(other))] == [410, 401]
                assert len(here.mailbox.boxes[2].lines) == 0

    asyncio.run(story())


def test_ends_are_remembered_with_their_reasons_and_without_their_calls(monkeypatch):
    monkeypatch.setattr(conversation, "KEPT_ENDS", 2)

    async def story():
        async with opened() as here:
            ended = [here.conversation(task) for task in (1, 2, 3)]
            kept = weakref.WeakSet(ended)
            said = []
            ends = AgentEnd("died", "x" * 2000), AgentEnd("timeout"), AgentEnd("ended")
            for one, end in zip(ended, ends, strict=True):
                await one.finish(end)
                here.conversations.end(one)
            async with httpx.AsyncClient() as client:
                for one in ended:
                    url = f"{here.url(one)}/v1/chat/completions"
                    answer = await client.post(url, json=ASK, headers=keyed(one))
                    said.append((answer.status_code, answer.json()["error"]["message"]))
            assert said[0][0] == 401
            assert said[1:] == [
                (410, "the conversation is over: timeout"),
                (410, "the conversation is over: ended"),
            ]
            del ended, one
            gc.collect()
            assert not kept

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
            writer.write(head(conversation, conversation.key, "Content-Length: 100") + b"{")
            idle, idle_writer = await asyncio.open_connection("127.0.0.1", here.port)
            idle_writer.write(b"POST /conversations/1")

            async with asyncio.timeout(10):
                assert await status_of(reader) == 408
                assert await idle.read() == b""
            writer.close()
            idle_writer.close()

    asyncio.run(story())


def test_a_connection_that_has_had_an_answer_has_no_longer_for_its_next_request(monkeypatch):
    monkeypatch.setattr(door, "HEADERS_S", 0.3)

    async def story():
        async with opened(body_s=0.3) as here:
            conversation = here.conversation()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(head(conversation, conversation.key, method="GET", path="/task"))
            assert await status_of(reader) == 200
            writer.write(b"POST /conv")
            async with asyncio.timeout(4):  # uvicorn's own limit, of connections without bytes: 5 s
                await reader.read()
            writer.close()

    asyncio.run(story())


def test_a_connection_outlives_the_five_seconds_for_which_clients_keep_theirs():
    """Ended by both at once, it failed a request of one in thirty agents that call together."""

    async def story():
        async with opened() as here:
            conversation = here.conversation()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            for pause_s in (5.5, 0.1):
                writer.write(head(conversation, conversation.key, method="GET", path="/task"))
                assert await status_of(reader) == 200
                await asyncio.sleep(pause_s)
                await reader.read(2**16)  # the rest of the answer
            writer.close()

    asyncio.run(story())


def test_a_body_without_end_after_an_answer_is_cut(monkeypatch):
    monkeypatch.setattr(door, "HEADERS_S", 0.3)

    async def story():
        async with opened() as here:
            conversation = here.conversation()
            lines = (conversation.key, "Transfer-Encoding: chunked")
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(head(conversation, *lines, method="GET", path="/task"))
            assert await status_of(reader) == 200
            began = time.monotonic()
            try:
                while time.monotonic() < began + 20:
                    writer.write(b"4\r\nmore\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            except ConnectionError:
                pass
            assert time.monotonic() < began + 20

    asyncio.run(story())


def test_an_agent_that_does_not_read_its_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(door, "SEND_S", 0.3)

    async def model(_call, _number):
        return AgentAnswer("stop", 5, 2, text="x" * (7 * 2**20))

    async def story():
        async with opened(model) as here:
            conversation = here.conversation()
            body = json.dumps(ASK).encode()
            with socket.create_connection(("127.0.0.1", here.port)) as unread:
                lines = (conversation.key, f"Content-Length: {len(body)}")
                unread.sendall(head(conversation, *lines) + body)
                await until(lambda: conversation.num_requests == 1)
                await until(lambda: conversation.num_requests == 0)

    asyncio.run(story())


def test_pipelined_requests_are_answered_one_after_the_other():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            body = json.dumps(ASK).encode()
            lines = (conversation.key, f"Content-Length: {len(body)}")
            ask = head(conversation, *lines) + body
            last = head(conversation, *lines, "Connection: close") + body
            said = await exchange(here, 20 * ask + last)

            assert said.count(b"HTTP/1.1 200 OK") == 21
            answers = [f"hello {number}".encode() for number in range(1, 22)]
            places = [said.index(answer) for answer in answers]
            assert places == sorted(places)

    asyncio.run(story())


def test_a_body_is_only_asked_for_with_a_key():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            body = json.dumps(ASK).encode()
            lines = ("Expect: 100-continue", f"Content-Length: {len(body)}", "Connection: close")
            with_key = await exchange(here, head(conversation, conversation.key, *lines) + body)
            without = await exchange(here, head(conversation, "wrong", *lines))

            assert with_key.startswith(b"HTTP/1.1 100 ")
            assert b"HTTP/1.1 200 OK" in with_key
            assert without.startswith(b"HTTP/1.1 401 ")

    asyncio.run(story())


def test_what_is_no_http_is_refused_and_logs_nothing(caplog):
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            for lines in (
                ("Transfer-Encoding: chunked\r\n\r\nzz",),
                ("Content-Length: 5", "Content-Length: 6"),
                ("Content-Length: -5",),
                ("Content-Length: " + "9" * 30,),
                ("No colon",),
                ("Nul: \0",),
            ):
                for method, path in (("POST", "/v1/chat/completions"), ("GET", "/task")):
                    sent = head(conversation, conversation.key, *lines, method=method, path=path)
                    assert (await exchange(here, sent)).startswith(b"HTTP/1.1 400 "), lines
            assert here.mailbox.boxes[1].lines == []

    asyncio.run(story())

    assert caplog.records == []


def test_a_key_counts_in_headers_alone_and_no_other_address_leads_there():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            name, key = conversation.name, conversation.key
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{here.port}") as client:

                async def ask(path, method="GET", **headers):
                    answer = await client.request(method, path, headers=headers)
                    assert "location" not in answer.headers
                    assert "access-control-allow-origin" not in answer.headers
                    return answer.status_code

                at = f"/conversations/{name}"
                assert await ask(f"{at}%2Ftask", **keyed(conversation)) == 200
                for query in ("key", "api_key", "x-api-key", "authorization"):
                    assert await ask(f"{at}/task?{query}={key}") == 401
                assert await ask(f"{at}/task", Cookie=f"x-api-key={key}") == 401
                other = {"Host": "elsewhere.example", "Origin": "http://elsewhere.example"}
                assert await ask(f"{at}/task", **other) == 401
                for method in ("PUT", "DELETE", "OPTIONS", "TRACE", "BREW"):
                    assert await ask(f"{at}/task", method, **keyed(conversation)) == 404
            for path in (
                "",
                "/task/",
                "//task",
                "/task%00",
                "/%FF",
                f"/../{name}/task",
                f"%2F..%2F{name}%2Ftask",
            ):
                said = await exchange(here, head(conversation, key, method="GET", path=path))
                assert said.startswith(b"HTTP/1.1 404 "), path

    asyncio.run(story())


def test_huge_headers_are_refused():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            huge = "X-Huge: " + "x" * 2**20
            writer.write(head(conversation, conversation.key, huge, "Content-Length: 0"))
            async with asyncio.timeout(10):
                assert await status_of(reader) in {0, 400}
            writer.close()

    asyncio.run(story())


def test_connections_are_bounded_and_those_without_a_request_make_room():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            most = 4 * door.CONNECTIONS_PER_CONVERSATION
            pairs = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(most + 8)]
            await until(lambda: sum(reader.at_eof() for reader, _ in pairs) == 8)
            async with httpx.AsyncClient(headers=keyed(conversation)) as client:
                url = f"{here.url(conversation)}/v1/chat/completions"
                assert (await client.post(url, json=ASK)).status_code == 200
            await until(lambda: sum(reader.at_eof() for reader, _ in pairs) == 9)
            for _, writer in pairs:
                writer.close()

    asyncio.run(story())


def test_a_conversation_leaves_connections_to_others():
    released = asyncio.Event()

    async def model(call, number):
        if b"others" not in call.body:
            await released.wait()
        return AgentAnswer("stop", 5, 2, text=f"hello {number}")

    async def story():
        async with opened(model) as here:
            one, other = here.conversation(1), here.conversation(2)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=30, limits=limits) as client:

                def ask(conversation, content="2+3?", **headers):
                    url = f"{here.url(conversation)}/v1/chat/completions"
                    body = {"messages": [{"role": "user", "content": content}]}
                    return client.post(url, json=body, headers=keyed(conversation) | headers)

                most = door.CONNECTIONS_PER_CONVERSATION
                retry = {"x-stainless-retry-count": "1"}
                asking = [asyncio.create_task(ask(one, **retry)) for _ in range(most)]
                await until(lambda: one.num_requests == most)
                refused, another = await ask(one), await ask(other, "others")
                released.set()
                answers = [(await task).status_code for task in asking]

            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert another.status_code == 200
            assert answers == [200] * most
            assert one.num_requests == 0

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
                await until(lambda: conversation.open_calls.num_waiting == 32)
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
            assert len([*conversation.open_calls]) <= 33
            assert grown_kib < 50_000  # the twin keeps 20 MB of whole bodies

    asyncio.run(story())


def test_the_run_decides_how_tokens_are_sampled():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            url = f"{here.url(conversation)}/v1/chat/completions"
            wishes = {"temperature": 0, "top_p": 0.1, "top_k": 1, "seed": 1, "presence_penalty": 2}
            async with httpx.AsyncClient(headers=keyed(conversation)) as client:
                assert (await client.post(url, json=ASK | wishes)).status_code == 200
                for forced in (
                    {"tool_choice": "required"},
                    {"tool_choice": {"type": "function", "function": {"name": "add"}}},
                    {"response_format": {"type": "json_object"}},
                    {"guided_json": {"type": "object"}},
                    {"structured_outputs": {"regex": "a+"}},
                    {"logit_bias": {"5": 100}},
                    {"n": 2},
                ):
                    answer = await client.post(url, json=ASK | forced)
                    assert answer.status_code == 400, forced
                    assert answer.json()["error"]["param"] == next(iter(forced))

            (body,) = here.mailbox.boxes[1].bodies
            assert json.loads(decode_call(body).body) == ASK

    asyncio.run(story())


@pytest.mark.parametrize(
    "field",
    [
        '"content": "a\\u0000b"',
        '"content": "a", "content": "b"',
        '"content": "a", "x": ' + "9" * 400,
        '"content": "a", "x": -' + "9" * 5000,
        '"content": "a", "x": 1e999',
        '"content": "\\ud800"',
        '"content": "a\0b"',
        '"content": "a", "x": ' + 10**4 * "[" + 10**4 * "]",
    ],
)
def test_odd_json_is_answered_or_refused_and_nothing_else(field, caplog):
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            url = f"{here.url(conversation)}/v1/chat/completions"
            body = f'{{"messages":[{{"role": "user", {field}}}]}}'.encode()
            async with httpx.AsyncClient(headers=keyed(conversation)) as client:
                answer = await client.post(url, content=body)
                stored = [decode_call(body) for body in here.mailbox.boxes[1].bodies]
                assert answer.status_code in {200, 400}
                assert len(stored) == (answer.status_code == 200)
                assert all(call.body == body for call in stored)
                assert (await client.post(url, json=ASK)).status_code == 200

    asyncio.run(story())

    assert caplog.records == []


@pytest.mark.parametrize(
    "body",
    [
        '{"reward": 1%s}' % (400 * "0"),
        '{"reward": 1, "parts": {"a": 1%s}}' % (400 * "0"),
        '{"reward": 1e999}',
        '{"reward": NaN}',
        '{"reward": true}',
        '{"reward": 1, "parts": {"\\ud83d": 1}}',
        '{"reward": 1, "call": 99999999999999999999}',
        '{"reward": 1, "call": -1}',
        '{"reward": 1, "call": 1}',
    ],
)
def test_a_reward_that_is_no_number_of_a_call_is_refused(body):
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            async with httpx.AsyncClient(headers=keyed(conversation)) as client:
                answer = await client.post(f"{here.url(conversation)}/reward", content=body)

            assert answer.status_code == 400
            assert here.mailbox.boxes[1].ends == []

    asyncio.run(story())


def test_names_of_ignored_fields_are_told_in_bounds(caplog):
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            url = f"{here.url(conversation)}/v1/chat/completions"
            many = {f"x{number}": 1 for number in range(10_000)} | {10**6 * "a": 1}
            with capture_logs() as lines:
                async with httpx.AsyncClient(headers=keyed(conversation)) as client:
                    assert (await client.post(url, json=ASK | many)).status_code == 200
                    assert (await client.post(url, json=ASK | {10**6 * "b": 1})).status_code == 200

            assert 0 < len(json.dumps(lines)) < 10_000

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


SERVER = """
import asyncio
from tests.agents.support.opened_door import opened

async def serve():
    async with opened() as here:
        conversation = here.conversation()
        print(here.port, conversation.name, conversation.key, flush=True)
        await asyncio.sleep(600)

asyncio.run(serve())
"""


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def knock(port: int, sent: bytes, *, part: bytes = b"", count: int = 0) -> None:
    """Send bytes, and more of them until the door ends the connection; wait for that."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        for _ in range(count):
            writer.write(part)
            await writer.drain()
        await reader.read()
        writer.close()
    except ConnectionError:
        pass


async def attack(port: int, name: str, key: str, look: Callable[[], None]) -> None:
    """Send heads without end on many connections, and bodies without end; look meanwhile."""
    head = f"POST /conversations/{name}/v1/chat/completions HTTP/1.1\r\nHost: h\r\n".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n"
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"

    async def watch() -> None:
        while True:
            look()
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    for sent in (b"no", key.encode()):
        start = chunked + b"X-Api-Key: " + sent + b"\r\n\r\n"
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(knock(port, start, part=chunk, count=200))
    async with asyncio.TaskGroup() as group:
        for _ in range(500):
            group.create_task(knock(port, head + b"X-Big: " + 60_000 * b"x"))
    watching.cancel()
    look()


@pytest.mark.slow
def test_the_memory_of_a_host_under_attack_is_bounded():
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port, name, key = server.stdout.readline().split()
            before = resident_mib(server.pid)
            seen = [before]
            asyncio.run(attack(int(port), name, key, lambda: seen.append(resident_mib(server.pid))))
            print(f"\nresident, MiB: {before:.0f}, at most {max(seen):.0f}, after {seen[-1]:.0f}")

            assert max(seen) - before < 128
        finally:
            server.kill()
