"""A connection of an event loop to Redis: many calls under way at once, answered in order.

redis-py opens it, with all that an address may ask for (TLS, sentinels, a password, the greeting of
`server_life.py`). Then the stream is ours: a call is one write and one future. Asked through
redis-py's own client, it costs the broker three to five times as much, more than all else that the
broker does for a heartbeat.

Nothing is ever sent twice: when a connection ends, all that waits on it fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis
import redis
from redis.asyncio import Redis
from redis.asyncio.connection import DefaultParser

from .operation import Argument, Reply

COPIED_BYTES = 2048
"""A longer argument is handed to the system as it is; of shorter ones a copy is made."""

CLOSED = "Connection closed by server."

parse_error: Any = DefaultParser.parse_error  # the library's own names for what Redis refuses


@dataclass(slots=True)
class _Question:
    """Commands that went out together."""

    answered: asyncio.Future[list[Reply]]
    missing: int
    replies: list[Reply] = field(default_factory=list)


class Line:
    """Keeps a connection that calls go over, and dials anew when it has ended."""

    def __init__(self, client: Redis, *, timeout_s: float) -> None:
        """Remember where to; nothing is sent before the first call.

        Args:
            client: Whose address, password and greeting each connection has.
            timeout_s: For the replies of one call.
        """
        self._client = client
        self._timeout_s = timeout_s
        self._stream: _Stream | None = None
        self._dialling: asyncio.Task[_Stream] | None = None

    async def ask(self, *commands: Sequence[Argument]) -> list[Reply]:
        """Send commands together; returns their replies, of which any may be a `RedisError`.

        Raises:
            redis.ConnectionError: there is no connection, or it ended; they may have been done.
            redis.TimeoutError: no answer in time; there will be none, as the connection is closed.
        """
        stream = self._stream
        if stream is None or not stream.is_open:
            stream = await self._dial()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await stream.ask(commands)
        except TimeoutError:
            stream.close()
            raise redis.TimeoutError("Timeout reading from socket") from None

    async def close(self) -> None:
        """Hang up."""
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        if self._stream is not None:
            await self._stream.hang_up()

    async def _dial(self) -> _Stream:
        """Connect; all who come meanwhile share the outcome."""
        if self._dialling is None:
            self._dialling = asyncio.create_task(self._connect())
            self._dialling.add_done_callback(self._dialled)
        return await asyncio.shield(self._dialling)

    async def _connect(self) -> _Stream:
        if self._stream is not None:
            await self._stream.hang_up()
        pool: Any = self._client.connection_pool
        opened = pool.make_connection()
        try:
            await opened.connect()
        except BaseException:
            await opened.disconnect(nowait=True)
            raise
        self._stream = _Stream(opened)
        return self._stream

    def _dialled(self, dialling: asyncio.Task[_Stream]) -> None:
        self._dialling = None
        if not dialling.cancelled():
            dialling.exception()  # whoever still waits has it


class _Stream(asyncio.Protocol):
    """A connection that is open, or was."""

    def __init__(self, opened: Any) -> None:
        """Take the stream of a connection of redis-py, on which no reply is under way."""
        self._opened = opened
        self._questions: deque[_Question] = deque()
        self._replies = hiredis.Reader(protocolError=redis.InvalidResponse, replyError=parse_error)
        self._writable = asyncio.Event()
        self._writable.set()
        self.is_open = True
        writer = opened._writer  # the library has no public name for it
        self._transport: asyncio.Transport = writer.transport
        self._transport.set_protocol(self)

    async def ask(self, commands: Sequence[Sequence[Argument]]) -> list[Reply]:
        await self._writable.wait()
        if not self.is_open:
            raise redis.ConnectionError(CLOSED)
        answered: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._questions.append(_Question(answered, len(commands)))
        self._transport.writelines(packed(commands))
        return await answered

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    async def hang_up(self) -> None:
        self.close()
        await self._opened.disconnect(nowait=True)  # else it would warn that nobody did

    def data_received(self, data: bytes) -> None:
        """Take what has arrived (`asyncio.Protocol`)."""
        self._replies.feed(data)
        # What is no reply, or nobody's, raises here, and the event loop ends the connection.
        while (reply := self._replies.gets()) is not False:
            self._take(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all who wait (`asyncio.Protocol`)."""
        self.is_open = False
        self._writable.set()
        for question in self._questions:
            if not question.answered.done():
                question.answered.set_exception(redis.ConnectionError(str(exc or CLOSED)))
        self._questions.clear()

    def pause_writing(self) -> None:
        """Redis reads more slowly than we write (`asyncio.Protocol`)."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Redis has caught up (`asyncio.Protocol`)."""
        self._writable.set()

    def _take(self, reply: Reply) -> None:
        question = self._questions[0]
        question.replies.append(reply)
        question.missing -= 1
        if not question.missing:
            self._questions.popleft()
            if not question.answered.done():  # else nobody waits any more
                question.answered.set_result(question.replies)
        if isinstance(reply, redis.ReadOnlyError):  # no longer the primary: ask who is
            self.close()


def packed(commands: Sequence[Sequence[Argument]]) -> list[bytes]:
    """Write commands in Redis' protocol (RESP); returns the pieces to send."""
    pieces: list[bytes] = []
    short: list[bytes] = []
    for command in commands:
        short.append(b"*%d\r\n" % len(command))
        for argument in command:
            value = argument if isinstance(argument, bytes) else str(argument).encode()
            if len(value) <= COPIED_BYTES:
                short.append(b"$%d\r\n%b\r\n" % (len(value), value))
                continue
            short.append(b"$%d\r\n" % len(value))
            pieces += (b"".join(short), value)
            short = [b"\r\n"]
    pieces.append(b"".join(short))
    return pieces
