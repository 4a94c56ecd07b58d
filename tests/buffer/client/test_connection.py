"""The asyncio client's connection: order, ends of every kind, and what goes over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import hiredis
import pytest
import redis
import redis.asyncio
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from buffer.client.address import connect_async, disconnect_async
from buffer.client.connection import COPIED_BYTES, PipelinedConnection, packed, stream_of
from tests.waiting import until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def connection_to(url: str, *, timeout_s: float = 10.0) -> AsyncIterator[PipelinedConnection]:
    client = connect_async(f"{url}?socket_timeout={timeout_s}&protocol=3&client_name=pipelined")
    connection = PipelinedConnection(client)
    try:
        yield connection
    finally:
        await connection.close()
        await disconnect_async(client)


@asynccontextmanager
async def served_by(serve: Serve) -> AsyncIterator[str]:
    """A server of ours; it ends each connection after `serve`."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()


async def greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say OK to what the library says first, until a PING comes."""
    replies = hiredis.Reader()
    while True:
        replies.feed(await reader.read(65536))
        while (command := replies.gets()) is not False:
            if command == [b"PING"]:
                return
            writer.write(b"+OK\r\n")


def test_calls_at_once_are_answered_each_with_its_own_over_one_connection(redis_url: str) -> None:
    async def ask() -> tuple[list[object], int]:
        async with connection_to(redis_url) as connection:
            calls = [
                connection.execute_commands(("ECHO", f"{i}" * (1 + 997 * (i % 9))))
                for i in range(200)
            ]
            found = [reply for [reply] in await asyncio.gather(*calls)]
            [clients] = await connection.execute_commands(("CLIENT", "LIST"))
            return found, clients.count(b"name=pipelined")

    found, connections = asyncio.run(ask())
    assert found == [b"%d" % i * (1 + 997 * (i % 9)) for i in range(200)]
    assert connections == 1


def test_a_caller_who_gives_up_takes_nobody_elses_reply(redis_url: str) -> None:
    async def ask() -> object:
        async with connection_to(redis_url) as connection:
            await connection.execute_commands(("PING",))
            gone = asyncio.create_task(
                connection.execute_commands(("ECHO", "gone"), ("ECHO", "too"))
            )
            await asyncio.sleep(0)
            gone.cancel()
            return await connection.execute_commands(("ECHO", "here"))

    assert asyncio.run(ask()) == [b"here"]


def test_what_waits_fails_when_the_connection_ends_and_the_next_call_dials(redis_url: str) -> None:
    async def ask() -> object:
        async with connection_to(redis_url) as connection, connection_to(redis_url) as other:
            [number] = await connection.execute_commands(("CLIENT", "ID"))
            waiting = [
                asyncio.create_task(connection.execute_commands(("BLPOP", "nothing", 30)))
                for _ in range(3)
            ]

            async def waits() -> bool:
                [clients] = await other.execute_commands(("CLIENT", "LIST"))
                return b"cmd=blpop" in clients

            await until(waits)
            await other.execute_commands(("CLIENT", "KILL", "ID", number))
            for task in waiting:
                with pytest.raises(redis.ConnectionError, match="closed by server"):
                    await task
            return await connection.execute_commands(("ECHO", "again"))

    assert asyncio.run(ask()) == [b"again"]


def test_a_refusal_is_returned_as_the_librarys_own_error(redis_url: str) -> None:
    async def ask() -> list[Any]:
        async with connection_to(redis_url) as connection:
            return await connection.execute_commands(
                ("MULTI",), ("EVALSHA", "0" * 40, 0), ("EXEC",), ("ECHO", "x")
            )

    multi, queued, [inner], after = asyncio.run(ask())
    assert (multi, queued, after) == (b"OK", b"QUEUED", b"x")
    assert isinstance(inner, redis.exceptions.NoScriptError)


def test_a_silent_server_is_given_up_and_its_late_reply_is_nobodys() -> None:
    lives, given_up, answered = 0, asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lives
        lives += 1
        await greeted(reader, writer)
        if lives == 1:
            await given_up.wait()
            writer.write(b"+LATE\r\n")
            answered.set()
            await reader.read()
        writer.write(b"+PONG\r\n")
        await reader.read()

    async def ask() -> object:
        async with served_by(serve) as url, connection_to(url, timeout_s=0.2) as connection:
            with pytest.raises(redis.TimeoutError):
                await connection.execute_commands(("PING",))
            given_up.set()
            await answered.wait()
            return await connection.execute_commands(("PING",))

    assert asyncio.run(ask()) == [b"PONG"]


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400\r\n", b"+PONG\r\n+WHO ASKED\r\n"])
def test_a_server_that_does_not_keep_to_the_protocol_is_left(answer: bytes) -> None:
    lives = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lives
        lives += 1
        await greeted(reader, writer)
        writer.write(answer if lives == 1 else b"+PONG\r\n")
        await reader.read()

    async def ask() -> object:
        async with served_by(serve) as url, connection_to(url) as connection:
            await asyncio.wait([asyncio.create_task(connection.execute_commands(("PING",)))])
            return await connection.execute_commands(("PING",))

    assert asyncio.run(ask()) == [b"PONG"]
    assert lives == 2


def test_who_is_no_longer_the_primary_is_asked_no_more() -> None:
    lives = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lives
        lives += 1
        await greeted(reader, writer)
        writer.write(b"-READONLY a replica\r\n" if lives == 1 else b"+PONG\r\n")
        await reader.read()

    async def ask() -> list[object]:
        async with served_by(serve) as url, connection_to(url) as connection:
            return [
                *await connection.execute_commands(("PING",)),
                *await connection.execute_commands(("PING",)),
            ]

    refused, taken = asyncio.run(ask())
    assert isinstance(refused, redis.ReadOnlyError)
    assert taken == b"PONG"


def test_all_who_come_while_it_connects_share_the_outcome() -> None:
    lives, all_have_come = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lives
        lives += 1
        await all_have_come.wait()

    async def ask() -> list[object]:
        async with served_by(serve) as url, connection_to(url) as connection:
            calls = [asyncio.create_task(connection.execute_commands(("PING",))) for _ in range(20)]
            await until(lambda: lives)
            all_have_come.set()
            return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(ask())
    assert all(isinstance(error, redis.ConnectionError) for error in found)
    assert lives == 1


def test_a_call_that_cannot_be_written_takes_nobody_elses_reply(redis_url: str) -> None:
    async def ask() -> object:
        async with connection_to(redis_url) as connection:
            with pytest.raises(UnicodeEncodeError):
                await connection.execute_commands(("ECHO", "\ud800"))
            return await connection.execute_commands(("ECHO", "here"))

    assert asyncio.run(ask()) == [b"here"]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_has_ended_before_it_was_used_is_known_at_once(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = b""
        while b"LIB-VER" not in words:
            words = await reader.read(65536)
            writer.write(b"+OK\r\n" * words.count(b"*"))

    async def ask() -> None:
        async with served_by(serve) as url, connection_to(url) as connection:
            connect = redis.asyncio.Connection.connect

            async def connect_slowly(connection: Any) -> None:
                await connect(connection)
                assert await connection._reader.read() == b"", "it waits for the end"

            monkeypatch.setattr(redis.asyncio.Connection, "connect", connect_slowly)
            with pytest.raises(redis.ConnectionError, match="closed by server"):
                await connection.execute_commands(("PING",))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(ask(), 5))


def test_who_waits_while_it_is_closed_hears_of_it_and_it_dials_no_more() -> None:
    lives, dialled = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lives
        lives += 1
        await reader.read(1)
        dialled.set()
        await reader.read()

    async def ask() -> None:
        async with served_by(serve) as url, connection_to(url) as connection:
            waiting = asyncio.create_task(connection.execute_commands(("PING",)))
            await dialled.wait()
            await connection.close()
            with pytest.raises(redis.ConnectionError, match="has been closed"):
                await waiting
            with pytest.raises(redis.ConnectionError, match="has been closed"):
                await connection.execute_commands(("PING",))

    asyncio.run(ask())
    assert lives == 1


def test_a_connection_leaves_a_primary_that_another_found_to_be_replaced(redis_url: str) -> None:
    async def ask() -> tuple[object, object]:
        client = connect_async(redis_url)
        pool: Any = client.connection_pool
        pool.master_address = ("first", 1)  # as the pool that asks sentinels notes it
        connection = PipelinedConnection(client)
        [before] = await connection.execute_commands(("CLIENT", "ID"))
        [same] = await connection.execute_commands(("CLIENT", "ID"))
        pool.master_address = ("second", 1)
        [after] = await connection.execute_commands(("CLIENT", "ID"))
        await connection.close()
        await disconnect_async(client)
        assert before == same
        return before, after

    before, after = asyncio.run(ask())
    assert before != after


_ARGUMENTS = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40),
    st.integers(),
    st.floats(allow_nan=False),
    st.integers(COPIED_BYTES - 1, COPIED_BYTES + 1).map(bytes),
)


@given(st.lists(st.lists(_ARGUMENTS, min_size=1, max_size=6), min_size=1, max_size=4))
def test_what_is_sent_is_read_back_as_it_was(commands: list[list[bytes | str | int]]) -> None:
    reader = hiredis.Reader()
    reader.feed(b"".join(packed(commands)))

    for command in commands:
        assert reader.gets() == [x if isinstance(x, bytes) else str(x).encode() for x in command]
    assert reader.gets() is False


def test_an_open_connection_of_redis_py_has_the_private_names_that_are_taken(
    redis_url: str,
) -> None:
    async def open_one() -> tuple[object, object]:
        client = connect_async(redis_url)
        opened = client.connection_pool.make_connection()
        await opened.connect()
        try:
            return stream_of(opened)
        finally:
            await opened.disconnect()
            await client.aclose()

    reader, writer = asyncio.run(open_one())

    assert isinstance(reader, asyncio.StreamReader)
    assert isinstance(writer, asyncio.StreamWriter)
